# SPDX-License-Identifier: Apache-2.0
"""``pcp run`` and ``pcp passes``: passes by name over a dump give the dump that the pipeline gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from pcp_passes import dumps
from pcp_passes.errors import ConfigError, DumpError, Refusal
from pcp_passes.ir import meta
from pcp_passes.ir.parsing.parser import parse_graph
from pcp_passes.ir.symbols import symbol_hints
from pcp_passes.passes import PASSES, SHARDED, Pass, PassContext, PassResult
from pcp_passes.passes.registry import PIPELINES, parse_passes, pass_registry

CAPTURED, LAST = "00-captured.txt", "05-lower-reshards.txt"


def test_a_pipeline_over_the_captured_graph_gives_the_same_dump(
    dump: Path, tmp_path: Path, pcp: Callable[..., Any], pcp_json: Callable[..., Any]
) -> None:
    code, data = pcp_json("run", "sharded", dump, "-o", tmp_path / "again")
    assert code == 0 and [step["pass"] for step in data["passes"]] == [step.name for step in SHARDED]
    assert [step["rewrites"] for step in data["passes"][1:]] == [4, 2, 2, 2]
    again = tmp_path / "again" / "sharded"
    assert sorted(p.name for p in again.iterdir()) == sorted(p.name for p in dump.iterdir())
    for file in dump.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert pcp("check", again).exit_code == 0
    assert data["graph"] == (dump / LAST).read_text()


def test_sizes_at_capture_are_those_that_passes_weigh_with(dump: Path) -> None:
    held = dumps.load_dump(dump)
    (symbol,) = held.hints
    assert held.hints == {symbol: 8}
    for hints, rows in ((held.hints, 8), ({}, 61)):
        graph = parse_graph(held.stages[0].text(), hints=hints).graph
        ids = next(meta.tensor(node) for node in graph.nodes if node.name == "l_ids_")
        assert symbol_hints(ids.shape) == {symbol: rows}


def test_passes_go_on_from_a_stage_with_what_stands_there(dump: Path, pcp: Any, pcp_json: Any) -> None:
    code, data = pcp_json("run", "coalesce-reshards,lower-reshards", dump / "03-mask-padding.txt")
    assert code == 0 and data["graph"] == (dump / LAST).read_text()
    result = pcp("run", "coalesce-reshards", dump / CAPTURED)
    assert isinstance(result.exception, ConfigError)
    assert "coalesce-reshards requires CONFLICT_FREE" in str(result.exception)


def test_the_table_shows_rewrites_notes_and_where_it_went(dump: Path, tmp_path: Path, pcp: Any) -> None:
    shown = pcp("run", "place-rows,mask-padding,coalesce-reshards", dump, "-o", tmp_path / "o").output
    assert "coalesce-reshards" not in shown  # it requires what no pass established: nothing ran
    assert not (tmp_path / "o").exists()
    shown = pcp("run", "place-rows,mask-padding", dump).stdout
    assert "sharded/00-captured.txt over 4 ranks" in shown and "nothing written (give -o FOLDER)" in shown
    shown = pcp("run", "mask-padding", dump / "03-mask-padding.txt", "--graph").stdout
    assert "the output buffer is zero-filled already" in shown and "return (%mul_24,)" in shown


def test_other_ranks_and_a_file_without_a_manifest(dump: Path, tmp_path: Path, pcp: Any, pcp_json: Any) -> None:
    code, data = pcp_json("run", "sharded", dump, "--pcp", "2")
    assert code == 0 and "pcp.all_gather_rows(%cat, 2, 'pcp')" in data["graph"]
    alone = tmp_path / "alone.txt"
    alone.write_text((dump / CAPTURED).read_text())
    result = pcp("run", "sharded", alone)
    assert isinstance(result.exception, DumpError) and "give --pcp" in str(result.exception)
    code, data = pcp_json("run", "sharded", alone, "--pcp", "4")
    assert code == 0 and data["graph"] == (dump / LAST).read_text()


def test_a_refusal_ends_with_what_was_done_so_far(dump: Path, tmp_path: Path, pcp: Any) -> None:
    result = pcp("run", "place-rows", dump / LAST, "-o", tmp_path / "o")
    assert isinstance(result.exception, Refusal)
    assert (tmp_path / "o" / "sharded" / CAPTURED).exists()


def test_refused(dump: Path, pcp: Any) -> None:
    def error(*args: object) -> str:
        result = pcp("run", *args)
        assert isinstance(result.exception, (ConfigError, DumpError)), result.output
        return str(result.exception)

    assert "holds a dump already" in error("sharded", dump, "-o", dump.parent)
    assert "Did you mean mask-padding?" in error("mask-paddin", dump)
    assert "found no pass in ','" in error(",", dump)
    assert "mask-padding has no option 'depth=3'; its options are none" in error("mask-padding:depth=3", dump)
    assert "runs mask-padding twice" in error("place-rows,mask-padding,mask-padding", dump)
    text = (dump / CAPTURED).read_text()
    (dump / CAPTURED).write_text(text.replace("torch.rsqrt(%add)", "vllm.not_loaded_here(%add)", 1))
    assert "vllm.not_loaded_here: not registered with PyTorch in this process" in error("sharded", dump)


def test_passes_lists_every_pass_with_its_contract(pcp: Any, pcp_json: Any) -> None:
    code, data = pcp_json("passes")
    assert code == 0
    listed = {step["name"]: step for step in data["passes"]}
    for step in PASSES:
        entry = listed[step.name]
        assert set(entry["establishes"]) == step.establishes and set(entry["requires"]) == step.requires
        assert set(entry["breaks"]) == step.breaks
        assert entry["summary"].endswith(".") and "``" not in entry["summary"]
    assert data["pipelines"]["sharded"] == [step.name for step in SHARDED]
    shown = pcp("passes").stdout
    assert all(step.name in shown for step in PASSES)


def test_every_registered_name_makes_its_pass() -> None:
    for name, cls in pass_registry().items():
        (made,) = parse_passes(name)
        assert isinstance(made, cls) and isinstance(made, Pass) and made.name == name
    for name, steps in PIPELINES.items():
        assert parse_passes(name) == steps
        assert {step.name for step in steps} <= set(pass_registry())


@dataclass(frozen=True)
class WithOptions:
    """A pass with an option of every kind."""

    count: int = 1
    balance: float | None = None
    deep: bool = False
    mode: Literal["safe", "fast"] = "safe"
    modules: tuple[str, ...] = ()
    label: str = ""
    other: dict[str, int] | None = None

    name: ClassVar[str] = "with-options"
    requires: ClassVar[frozenset[str]] = frozenset()
    establishes: ClassVar[frozenset[str]] = frozenset()
    breaks: ClassVar[frozenset[str]] = frozenset()

    def run(self, graph: Any, ctx: PassContext) -> PassResult:
        return PassResult(0, ("nothing",))


REGISTRY = pass_registry([WithOptions])


def test_options_have_the_types_of_the_fields() -> None:
    text = "with-options:count=3:balance=2.5:deep=true:mode=fast:modules=a.b+c:label=x"
    assert parse_passes(text, REGISTRY) == (WithOptions(3, 2.5, True, "fast", ("a.b", "c"), "x"),)
    assert parse_passes("with-options:balance=none", REGISTRY) == (WithOptions(),)


@pytest.mark.parametrize(
    "option, found",
    [
        ("count=x", "with-options:count is 'x'; required a int"),
        ("balance=x", "with-options:balance is 'x'; required a float or none"),
        ("deep=1", "with-options:deep is '1'; required a bool"),
        ("mode=slow", "with-options:mode is 'slow'; required one of safe, fast"),
        ("speed=1", "has no option 'speed=1'; its options are count, balance"),
        ("count", "has no option 'count'"),
        ("other=1", "required a dict"),
    ],
)
def test_options_of_another_type_are_refused(option: str, found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        parse_passes(f"with-options:{option}", REGISTRY)
    assert len(fields(WithOptions)) == 7
