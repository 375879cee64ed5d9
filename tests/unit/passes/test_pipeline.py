# SPDX-License-Identifier: Apache-2.0
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import fx

from pcp_passes.errors import ConfigError, InvariantError
from pcp_passes.ir import invariants
from pcp_passes.passes import (
    REPLICATED,
    SHARDED,
    CoalesceReshards,
    GatherCacheWrites,
    LowerReshards,
    MaskPadding,
    PassContext,
    PassResult,
    Pipeline,
    PlaceRows,
    body_pipeline,
    build_variants,
    copy_graph_module,
)  # fmt: skip
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.passes.pipeline import hash_sources
from tests import toy_runs

pytestmark = pytest.mark.unit
CTX = PassContext(4)
NONE: frozenset[str] = frozenset()


def test_order_is_checked_and_never_sorted() -> None:
    with pytest.raises(ConfigError) as refused:
        Pipeline((GatherCacheWrites(), PlaceRows()))
    text = str(refused.value)
    assert "gather-cache-writes requires PLACED" in text
    assert "gather-cache-writes > place-rows" in text
    assert "Move place-rows in front of it" in text


def test_a_missing_pass_is_named() -> None:
    with pytest.raises(ConfigError, match=r"lower-reshards requires CONFLICT_FREE.*Add a pass that establishes it"):
        Pipeline((PlaceRows(), LowerReshards()))


def test_a_pass_runs_once() -> None:
    with pytest.raises(ConfigError, match="place-rows twice"):
        Pipeline((PlaceRows(), PlaceRows()))


def test_what_must_hold_at_the_end_is_checked() -> None:
    marked = (PlaceRows(), GatherCacheWrites(), MaskPadding(), CoalesceReshards())
    Pipeline(marked)
    with pytest.raises(ConfigError, match="ends without LOWERED"):
        Pipeline(marked, ensures=frozenset({invariants.LOWERED}))


@dataclass(frozen=True)
class Careless:
    """A pass that breaks something and does not say so."""

    name: ClassVar[str] = "careless"
    requires: ClassVar[frozenset[str]] = NONE
    establishes: ClassVar[frozenset[str]] = NONE
    breaks: ClassVar[frozenset[str]] = NONE
    silent: bool = False

    def run(self, graph: fx.Graph, ctx: PassContext) -> PassResult:
        for node in graph.nodes:
            if node.target is torch.zeros:
                node.target = torch.empty
        return PassResult(0, () if self.silent else ("a reason",))


def test_verification_sees_what_a_pass_broke_without_saying_so() -> None:
    gm = toy_runs.captured()[1].gm
    broken = Pipeline((*SHARDED, Careless()), (VerifyObserver("final"),))
    with pytest.raises(InvariantError, match=r"PADDING_DEFINED.*2 offenders"):
        broken.run(copy_graph_module(gm), CTX)
    Pipeline((*SHARDED, Careless())).run(copy_graph_module(gm), CTX)  # nobody looked


def test_zero_rewrites_without_a_reason_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="careless did nothing and gave no reason"):
        Pipeline((Careless(silent=True),)).run(copy_graph_module(toy_runs.captured()[1].gm), CTX)


def test_both_bodies_take_the_captured_inputs_and_share_parameters() -> None:
    gm = toy_runs.captured()[1].gm
    before = toy_runs.structure(gm)
    bodies = build_variants(gm, CTX, [VerifyObserver("full")])
    assert list(bodies) == ["sharded", "replicated"]
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    for body in bodies.values():
        assert [node.name for node in body.graph.nodes if node.op == "placeholder"] == names
        assert body.meta == gm.meta
    assert toy_runs.structure(gm) == before
    assert "pcp." not in toy_runs.structure(bodies["replicated"])
    assert toy_runs.structure(bodies["sharded"]).count("pcp.all_gather_rows") == 2


def test_a_copy_keeps_what_dynamo_hangs_on_a_graph() -> None:
    gm = toy_runs.captured()[1].gm
    copy = copy_graph_module(gm)
    assert copy._param_name_to_source == gm._param_name_to_source
    for captured, own in zip(gm.graph.nodes, copy.graph.nodes, strict=True):
        assert getattr(own, "_dynamo_source", None) == getattr(captured, "_dynamo_source", None)
        assert "grapharg" not in own.meta
        own.meta["mark"] = True
        assert "mark" not in captured.meta


@pytest.mark.parametrize("kind", ["dense", "latent"])
def test_the_replicated_body_equals_the_captured_graph(kind: str) -> None:
    from tests import toy

    world = toy.World(toy_runs.MIXED, 2)
    model, capture = toy_runs.captured(kind)
    body = build_variants(capture.gm, CTX)["replicated"]
    with toy.running(world.unsharded(model, torch.float32)):
        found = body(*capture.bind(world.ids, world.positions))[0]
    assert torch.equal(found, toy_runs.unsharded(world, kind))


@pytest.mark.parametrize("kind", ["dense", "latent"])
@pytest.mark.parametrize("pcp", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_sharded_body_equals_the_unsharded_run(kind: str, pcp: int, dtype: torch.dtype) -> None:
    from tests import toy

    world = toy.World(toy_runs.MIXED, pcp)
    body = build_variants(toy_runs.captured(kind, dtype=dtype)[1].gm, PassContext(pcp))["sharded"]
    found = toy_runs.sharded(body, world, kind, dtype).restored
    torch.testing.assert_close(found, toy_runs.unsharded(world, kind, dtype), rtol=0, atol=toy_runs.TOLERANCE[dtype])


def test_pipelines_are_what_the_entry_points_give() -> None:
    assert body_pipeline().passes == SHARDED
    assert body_pipeline("replicated").passes == REPLICATED
    assert "coalesce-reshards" not in [step.name for step in body_pipeline(pack=False).passes]


@pytest.mark.parametrize("bad", [{"pcp": 0}, {"pcp": 2, "variant": "both"}])
def test_a_context_that_cannot_run_is_refused(bad) -> None:
    with pytest.raises(ConfigError, match="required"):
        PassContext(**bad)


def test_uuid_depends_on_everything_that_decides_the_graph() -> None:
    pipeline = body_pipeline()
    base = pipeline.uuid(CTX, "zigzag", {"gather": {"pack": True}})
    assert base == body_pipeline().uuid(CTX, "zigzag", {"gather": {"pack": True}})
    others = {
        pipeline.uuid(PassContext(2), "zigzag", {"gather": {"pack": True}}),
        pipeline.uuid(PassContext(4, axis="cp"), "zigzag", {"gather": {"pack": True}}),
        pipeline.uuid(PassContext(4, shared_cache_layers=frozenset({"a"})), "zigzag", {"gather": {"pack": True}}),
        pipeline.uuid(CTX, "contiguous", {"gather": {"pack": True}}),
        pipeline.uuid(CTX, "zigzag", {"gather": {"pack": False}}),
        body_pipeline(pack=False).uuid(CTX, "zigzag", {"gather": {"pack": True}}),
        body_pipeline("replicated").uuid(CTX, "zigzag", {"gather": {"pack": True}}),
    }
    assert len(others | {base}) == 8


def test_the_source_hash_sees_contents_names_and_new_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "sub" / "b.py").write_text("y = 1\n")
    seen = {hash_sources(tmp_path)}
    (tmp_path / "note.txt").write_text("not a source")
    assert hash_sources(tmp_path) in seen
    (tmp_path / "a.py").write_text("x = 2\n")
    seen.add(hash_sources(tmp_path))
    (tmp_path / "a.py").rename(tmp_path / "c.py")
    seen.add(hash_sources(tmp_path))
    (tmp_path / "sub" / "d.py").write_text("")
    seen.add(hash_sources(tmp_path))
    assert len(seen) == 4
