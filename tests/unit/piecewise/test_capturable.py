# SPDX-License-Identifier: Apache-2.0
"""CAPTURABLE: what is clean, and every planted fault with the line of the model that holds it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.engine.bodies import capture, trace
from pcp_passes.errors import InvariantError, Refusal
from pcp_passes.ir import invariants, meta
from pcp_passes.paged import index_topk, index_write
from pcp_passes.passes import PassContext
from pcp_passes.piecewise.capturable import offences
from pcp_passes.piecewise.invariants import CAPTURABLE
from pcp_passes.piecewise.pieces import pieces_of
from pcp_passes.piecewise.report import report_body
from pcp_passes.piecewise.split import split_body
from tests.unit.piecewise import splits

pytestmark = pytest.mark.unit
CTX = PassContext(2)

aten: Any = torch.ops.aten


def two_layers(module: Any, x: torch.Tensor) -> torch.Tensor:
    x = splits.attend(x @ module.first, "0")
    return splits.attend((x @ module.second).relu(), "1").sin()


class Planted(splits.Body):
    """PyTorch notes the lines of ``forward`` functions only, so the faults are in those."""

    def __init__(self) -> None:
        super().__init__(two_layers)


class Item(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Nonzero(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x > 0).nonzero().shape[0]


class BooleanIndex(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x[x > 0].sum()


class Unique(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.unique(x).numel()


class PythonValues(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor([1.0, 2.0] * 4, dtype=x.dtype, device=x.device)


class Branch(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else -x


class OnCpu(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones(8, device="cpu")


class ToCpu(Planted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cpu() + x


def _line(kind: type[Planted]) -> str:
    return f"test_capturable.py:{inspect.getsourcelines(kind.forward)[1] + 1}"


def _traced(kind: type[Planted], device: str = "cpu") -> fx.GraphModule:
    return trace(kind().to(device), (torch.zeros(7, splits.WIDTH, dtype=torch.float64, device=device),))


def _on_meta() -> fx.GraphModule:
    hidden = torch.zeros(7, splits.WIDTH, dtype=torch.float64, device="meta")
    return capture(splits.Body(two_layers).to("meta"), (hidden,), CTX)["replicated"]


@pytest.mark.parametrize(
    ("kind", "op", "why"),
    [
        (Item, "item", "reads a value on the host"),
        (Nonzero, "nonzero", "size of its result from data"),
        (BooleanIndex, "index", "boolean index"),
        (Unique, "_unique2", "size of its result from data"),
        (PythonValues, "_tensor_constant0", "made of Python values"),
    ],
)
def test_a_planted_fault_is_named_with_its_line(kind: type[Planted], op: str, why: str) -> None:
    graph = _traced(kind)
    (node, found), *more = offences(graph)
    assert op in node.name and why in found and not more
    assert meta.source_line(node) == _line(kind)
    with pytest.raises(InvariantError, match=rf"CAPTURABLE[\s\S]*{_line(kind)}"):
        invariants.check({CAPTURABLE}, graph.graph, CTX)


@pytest.mark.parametrize(("kind", "device"), [(Branch, "cpu"), (OnCpu, "meta"), (ToCpu, "meta")])
def test_what_stops_the_capture_is_named_with_its_line(kind: type[Planted], device: str) -> None:
    """On ``meta`` a tensor of the CPU does not mix with others; on the CPU it cannot be told from them."""
    with pytest.raises(Refusal, match=rf"source  {_line(kind)}"):
        _traced(kind, device)


def test_a_replicated_body_and_its_pieces_are_clean() -> None:
    body = splits.body(two_layers)
    assert offences(body) == []
    invariants.check({CAPTURABLE}, body.graph, CTX)
    split = split_body(body, CTX)
    assert len(pieces_of(split)) == 3 and offences(split) == []
    invariants.check({CAPTURABLE}, split.graph, CTX)


def test_a_sharded_body_is_stopped_by_its_collectives_alone() -> None:
    body = splits.body(two_layers, "sharded")
    found = offences(body)
    assert [node.target for node, _ in found] == [torch.ops.pcp.all_gather_rows.default] * 2
    assert all("ranks meet here" in why for _, why in found)
    assert offences(body, "inside") == []
    assert offences(split_body(body, CTX)) == []


def test_a_constant_that_a_piece_is_given_is_named() -> None:
    split = split_body(capture(PythonValues(), (torch.zeros(7, splits.WIDTH).double(),), CTX)["replicated"], CTX)
    (node, why), *more = offences(split)
    assert node.op == "get_attr" and "made of Python values" in why and not more
    assert meta.source_line(node) == _line(PythonValues)


Change = Callable[[fx.Graph, fx.Node], None]


def _insert(target: Any, *rest: Any, **kwargs: Any) -> Change:
    """Let a call of ``target`` on the first input be part of the piece."""

    def change(graph: fx.Graph, first: fx.Node) -> None:
        with graph.inserting_before(graph.output_node()):
            made = graph.call_function(target, (first, *rest), kwargs)
        meta.set_aten_value(made, meta.value(first))

    return change


def _size_input(graph: fx.Graph, first: fx.Node) -> None:
    with graph.inserting_before(next(iter(graph.nodes))):
        meta.set_aten_value(graph.placeholder("rows"), meta.tensor(first).shape[0])  # type: ignore[union-attr]


def _second_symbol(graph: fx.Graph, first: fx.Node) -> None:
    held = meta.tensor(first)
    assert held is not None
    env = held.shape[0].node.shape_env  # type: ignore[attr-defined]
    with held.fake_mode:  # type: ignore[attr-defined]
        other = held.new_empty((env.create_unbacked_symint(), 3))
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        meta.set_aten_value(graph.placeholder("other"), other)


def _unsafe() -> Any:
    library = torch.library.Library("pcp_test", "FRAGMENT")
    library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl("unsafe", torch.clone, "CompositeExplicitAutograd")
    torch.library.register_fake("pcp_test::unsafe", torch.empty_like, lib=library)
    return library  # ends with its reference


SABOTAGE: dict[str, tuple[Change, str]] = {
    "a host read": (_insert(aten._local_scalar_dense.default), "reads a value on the host"),
    "a shape from data": (_insert(aten.nonzero.default), "size of its result from data"),
    "a copy to the host": (_insert(aten._to_copy.default, device=torch.device("cpu")), "to the host"),
    "a tensor of another device": (
        _insert(aten.new_ones.default, [3], device=torch.device("cpu")),
        "is on cpu, not on the GPU",
    ),
    "a written input": (_insert(aten.add_.Tensor, 1), "writes into"),
    "an op that fails": (_insert(aten.mm.default, 1), "does not run on CUDA operands"),
    "an input that is a size": (_size_input, "an input that is a size"),
    "a second symbol": (_second_symbol, "second symbol"),
}


@pytest.mark.parametrize("name", SABOTAGE)
def test_a_fault_in_a_piece_is_found(name: str) -> None:
    change, why = SABOTAGE[name]
    split = split_body(_on_meta(), CTX)
    assert offences(split) == []
    piece = pieces_of(split)[0]
    first = next(node for node in piece.gm.graph.nodes if meta.tensor(node) is not None)
    change(piece.gm.graph, first)
    with pytest.raises(InvariantError, match=rf"{CAPTURABLE}[\s\S]*{why}"):
        invariants.check({CAPTURABLE}, split.graph, CTX)


class Indexer(torch.nn.Module):
    def __init__(self, heads: int, dim: int, topk: int) -> None:
        super().__init__()
        self.heads, self.dim, self.topk = heads, dim, topk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = x.repeat(1, self.dim // x.shape[1])
        written = index_write(key, "target.0")
        q = key[:, None].expand(-1, self.heads, -1)
        chosen = index_topk(q, x[:, :1].expand(-1, self.heads), written, "target.0", self.topk)
        return x + chosen.sum(1, keepdim=True)


@pytest.mark.parametrize(
    ("dtype", "sizes", "says"),
    [
        (torch.bfloat16, (8, 64, 16), ""),
        (torch.float32, (2, 32, 2048), ""),
        (torch.float64, (8, 64, 16), "float64 has no kernel.*reference.*reads lengths on the host"),
        (torch.bfloat16, (12, 64, 16), "no kernel.*heads: found 12; supported"),
        (torch.bfloat16, (8, 96, 16), "no kernel.*dim: found 96; supported"),
        (torch.bfloat16, (8, 64, 40), "no kernel.*topk: found 40; supported"),
    ],
)
def test_an_index_selection_without_a_kernel_stops_a_full_graph_alone(
    dtype: torch.dtype, sizes: tuple[int, int, int], says: str
) -> None:
    """It is between pieces, so it is never in one."""
    body = capture(Indexer(*sizes), (torch.zeros(7, 8, dtype=dtype),), CTX)["replicated"]
    split = split_body(body, CTX)
    assert offences(split) == []
    report = report_body("target.replicated", body, split)
    assert not report.faults and [line.op for line in report.stops] == (["pcp.index_topk"] if says else [])
    if not says:
        assert offences(body) == []
        return
    assert re.search(says, report.stops[0].reason), report.stops[0].reason
    with pytest.raises(InvariantError, match=rf"CAPTURABLE[\s\S]*{says}"):
        invariants.check({CAPTURABLE}, body.graph, CTX)


def test_what_only_pytorch_knows_is_found() -> None:
    library = _unsafe()
    split = split_body(splits.body(two_layers), CTX)
    graph = pieces_of(split)[0].gm.graph
    _insert(torch.ops.pcp_test.unsafe.default)(graph, next(iter(graph.nodes)))
    (_, why), *more = offences(split)
    assert "PyTorch says that no CUDA graph can hold the op" in why and not more
    library._destroy()
