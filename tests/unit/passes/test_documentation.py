# SPDX-License-Identifier: Apache-2.0
import inspect
import re
from pathlib import Path

import pytest
import torch

from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import PASSES, SHARDED, PassContext
from pcp_passes.passes.document import document
from tests import toy, toy_runs

pytestmark = pytest.mark.unit
PAGE = Path(__file__).parents[3] / "docs" / "passes.md"


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text(encoding="utf-8") == document(), (
        "docs/passes.md is stale: run python -m pcp_passes.passes.document docs/passes.md"
    )


def test_the_page_has_a_section_for_every_pass() -> None:
    for step in PASSES:
        section = document().split(f"## {step.name}\n")[1].split("\n## ")[0]
        for part in ("Why:", "Before:", "After:", "- Requires:", "- Establishes:", "- Breaks:"):
            assert part in section, (step.name, part)


def example(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The body whose nodes the docstrings of the passes show."""
    linear = torch.nn.functional.linear(x, w)
    q = linear.view(-1, 2, 32)
    k, v = torch.relu(q), torch.tanh(q)
    empty = torch.empty((x.shape[0], 2, 32), dtype=x.dtype)
    layer = toy.LayerName("attn")
    write = torch.ops.pcp_toy.kv_cache_update(k, v, layer)
    torch.ops.pcp_toy.attention_with_output(q, k, v, empty, layer, kv_cache_dummy_dep=write)
    return empty


RENAMED = {
    r"   # .*$": "",
    r"\bs\d+\b": "s72",
    r"%l_([xw])_": r"%\1",
    r"%relu": "%k",
    r"%tanh": "%v",
    r"%synthetic_local_tmp_0_": "%layer",
    r"%attention_with_output": "%attend",
    r"pcp_toy\.(\w+?)(_with_output)?\(": r"toy.\1(",
}
"""What Dynamo calls a node, and what a docstring calls it."""


def _renamed(line: str) -> str:
    for pattern, name in RENAMED.items():
        line = re.sub(pattern, name, line)
    return line


def _matches(shown: str, printed: str) -> bool:
    """A docstring may leave out the type and placement of a node."""
    return shown == printed or shown == re.sub(r"^(%\w+) : .*? = ", r"\1 = ", printed)


@pytest.mark.parametrize("index", range(len(SHARDED)), ids=[step.name for step in SHARDED])
def test_before_and_after_of_a_docstring_are_what_the_printer_prints(index: int) -> None:
    gm = toy_runs.traced(lambda x: example(x, torch.ones(64, 64)), torch.randn(6, 64))
    doc = inspect.cleandoc(type(SHARDED[index]).__doc__ or "")
    blocks = re.findall(r"(?:Before|After)::\n\n(.*?)(?:\n\n(?=\S)|\Z)", doc, re.DOTALL)
    assert len(blocks) == 2
    for count, block in zip((index, index + 1), blocks, strict=True):
        graph, _ = toy_runs.apply(SHARDED[:count], gm, PassContext(4))
        printed = [_renamed(line).replace("%ones", "%w") for line in print_graph(graph).splitlines()]
        for line in map(str.strip, block.splitlines()):
            assert any(_matches(line, found) for found in printed), f"{line}\nnot in\n" + "\n".join(printed)


def test_the_comparison_can_fail() -> None:
    assert _matches("%a = torch.add(%b, 1)", "%a : f32[s72] shard(0) = torch.add(%b, 1)")
    assert not _matches("%a = torch.add(%b, 2)", "%a : f32[s72] shard(0) = torch.add(%b, 1)")
