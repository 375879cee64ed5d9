# SPDX-License-Identifier: Apache-2.0
"""Whether a CUDA graph could hold what a body runs, found without a GPU.

The graph is transplanted: a copy gets fake CUDA inputs and parameters, each device that it names becomes a CUDA device,
and every value is computed again. What is then on a CPU, depends on data, waits for the device, meets other ranks, or
is told by PyTorch to be unfit for a CUDA graph, is an offence with the line of the model that made it::

    for node, why in offences(split):
        logger.warning("%s: %s  %s", node, why, meta.source_line(node))

This is static compatibility, not capture: nothing has run, and a kernel may still do what its op does not say.

A graph that was captured on a CPU says ``device=cpu`` where the model says ``x.device``, too. So of such a graph only
tensors made of Python values are known to be on the CPU. Captured on ``meta``, as ``pcp inspect`` does, a model that
names a CPU is refused at capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from pcp_kernels import specs
from pcp_kernels.ops.launch import name_of
from pcp_passes.collectives import is_collective
from pcp_passes.frontends.torch.fresh import FreshSpace, fresh_space
from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.copies import copy_graph_module
from pcp_passes.ir.invariants import Offence
from pcp_passes.ir.markers import is_marker
from pcp_passes.ir.printer import type_text
from pcp_passes.ir.revalue import call_key
from pcp_passes.piecewise.cuts import Collectives, base_of
from pcp_passes.piecewise.pieces import piece_at
from pcp_passes.piecewise.sync_check import why_synced

DEVICE = torch.device("cuda", 0)

_CONSTANT = re.compile(r"(^|\.)_?(tensor_constant|lifted_tensor_?)\d+$")
"""What the tracer calls a tensor that the model made of Python values."""


def offences(gm: fx.GraphModule, collectives: Collectives = "outside") -> list[Offence]:
    """What keeps a graph from being captured, each node with the reason; empty when nothing does.

    Args:
        gm: a split body, whose pieces are looked at, equal ones once; or a graph that is to be captured whole.
        collectives: ``"inside"`` where the back end of the collectives can be captured.
    """
    found: list[Offence] = []
    seen: set[str] = set()
    pieces = False
    for node in gm.graph.nodes:
        piece = piece_at(gm.graph, node)
        if piece is None:
            continue
        pieces = True
        made = [n for n in node.all_input_nodes if n.op == "get_attr" and _CONSTANT.search(str(n.target))]
        found += [(n, _FROM_PYTHON) for n in made if n.name not in seen]
        seen.update(n.name for n in made)
        if piece.key not in seen:
            seen.add(piece.key)
            found += _offences_of(piece.gm, piece.collectives)
    return found if pieces else _offences_of(gm, collectives)


_FROM_PYTHON = (
    "is made of Python values, so it lies on the CPU: each call would copy it; make it a buffer of the module instead"
)


def _offences_of(gm: fx.GraphModule, collectives: Collectives) -> list[Offence]:
    moved = _Transplant(gm)
    originals = dict(zip(moved.gm.graph.nodes, gm.graph.nodes, strict=True))
    found: list[Offence] = []
    for node, original in originals.items():
        if node.op == "output":
            continue
        why = next(filter(None, (_why_here(original, collectives), moved.move(node))), None)
        found += [(original, why)] if why else []
    return found or [(originals[node], why) for node, why in _told_by_torch(moved.gm)]


def _why_here(node: fx.Node, collectives: Collectives) -> str | None:
    """What the captured node says by itself."""
    if node.op == "placeholder" and not meta.holds_tensor(node):
        return "an input that is a size: a graph is captured for one"
    if is_marker(node):
        return "a reshard that is not lowered yet"
    if is_collective(node) and collectives == "outside":
        return "ranks meet here, and a graph holds no collective unless they are to be inside"
    written = [target for target in rules.mutated_arguments(node) if base_of(target).op in ("placeholder", "get_attr")]
    if written:
        return f"writes into %{base_of(written[0]).name}, which it was given: a replay would find it written already"
    return _why_no_kernel(node) if rules.op_name(node) == "pcp::index_topk" else None


def _why_no_kernel(node: fx.Node) -> str | None:
    """Why no graph holds an index selection of these sizes, its keys being stored in the dtype of its queries.

    Whether a page of the cache has a kernel is looked at when an engine is made.
    """
    queries = meta.tensor(node.args[0])
    assert queries is not None, f"%{node.name} has no queries"
    if queries.dtype == torch.float64:
        return "float64 has no kernel: its reference runs on a GPU too, and reads lengths on the host"
    sizes: dict[str, Any] = {"heads": queries.shape[1], "dim": queries.shape[2]}
    try:
        specs.TopKSpec(topk=rules.named_argument(node, "topk"), store=name_of(queries.dtype), **sizes)
    except specs.UnsupportedSpec as error:
        return "has no kernel on a GPU: " + "; ".join(line.strip() for line in str(error).splitlines()[1:])
    return None


@lru_cache(maxsize=4)
def _shared_space(rows: int) -> tuple[FreshSpace, dict[str, Any]]:
    """A space for graphs captured with so many rows, and what calls give in it: layers and bodies repeat theirs."""
    return fresh_space(2, rows), {}


class _Transplant:
    """A copy of a graph, whose values are moved to a fake CUDA device node by node."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = copy_graph_module(gm)
        inputs = [tensor for node in gm.graph.find_nodes(op="placeholder") for tensor in meta.tensors(node)]
        held = [tensor for node in gm.graph.find_nodes(op="get_attr") for tensor in meta.tensors(node)]
        self.home = {tensor.device.type for tensor in inputs or held}
        sizes = [size for tensor in inputs for size in tensor.shape if fakes.has_token_symbol(size)]
        self.rows = next(iter(sizes), None)
        hint = self.rows.node.hint if isinstance(self.rows, torch.SymInt) else 0
        self.space, self.known = _shared_space(max(int(hint or 0), 2))
        self.values: dict[fx.Node, Any] = {}

    def move(self, node: fx.Node) -> str | None:
        """Give the copy of a node its value on the device; why a graph cannot hold the node, or ``None``."""
        if node.op in ("placeholder", "get_attr"):
            value, why = self._given(node)
        elif any(operand not in self.values for operand in node.all_input_nodes):
            return None  # of what an offender gave
        else:
            value, why = self._called(node)
        if value is None and why:
            return why
        self.values[node] = value
        meta.set_aten_value(node, value)
        return why

    def _given(self, node: fx.Node) -> tuple[Any, str | None]:
        value = meta.value(node)
        if not isinstance(value, torch.Tensor):
            return value, None
        why = _FROM_PYTHON if node.op == "get_attr" and _CONSTANT.search(str(node.target)) else None
        other = [s for s in (*value.shape, *value.stride()) if fakes.has_token_symbol(s) and not self._known(s)]
        if other:
            return None, f"{type_text(value)} has a size of a second symbol: a piece is captured for one count of rows"
        return self._fake(value, [self._size(s) for s in value.shape], [self._size(s) for s in value.stride()]), why

    def _known(self, size: Any) -> bool:
        return isinstance(self.rows, torch.SymInt) and size.node.expr.free_symbols == self.rows.node.expr.free_symbols

    def _size(self, size: Any) -> Any:
        """A size of the captured graph in the space of the copy."""
        if not fakes.has_token_symbol(size):
            return int(size)
        assert isinstance(self.rows, torch.SymInt)
        expression = size.node.expr.xreplace({self.rows.node.expr: self.space.rows.node.expr})
        return self.space.shape_env.create_symintnode(expression, hint=size.node.hint)

    def _fake(self, like: torch.Tensor, size: Any, stride: Any) -> torch.Tensor:
        with self.space.fake_mode:
            return torch.empty_strided(size, stride, dtype=like.dtype, device=DEVICE)

    def _called(self, node: fx.Node) -> tuple[Any, str | None]:
        args: Any = self._moved(fx.node.map_arg(node.args, self.values.__getitem__))
        kwargs: Any = self._moved(fx.node.map_arg(node.kwargs, self.values.__getitem__))
        node.args, node.kwargs = self._moved(node.args), self._moved(node.kwargs)
        if isinstance(node.target, torch._ops.OpOverload):
            why = why_synced(node.target, args, kwargs)
            if why:
                return None, why
        key = call_key(node)
        if key in self.known:
            return self.known[key], None
        try:
            with self.space.ambient():
                call = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
                rest = args[1:] if node.op == "call_method" else args
                value = fakes.call_on_fakes(self.space.fake_mode, call, rest, kwargs)
        except Exception as error:  # an op can fail in any way it likes
            return (
                None,
                f"does not run on CUDA operands: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            )
        if any(fakes.has_unbacked_symbol(size) for tensor in fakes.tensors_in(value) for size in tensor.shape):
            return None, "takes the size of its result from data"
        elsewhere = [tensor for tensor in fakes.tensors_in(value) if tensor.device != DEVICE]
        if elsewhere:
            return None, f"its result {type_text(elsewhere[0])} is on {elsewhere[0].device}, not on the GPU"
        self.known[key] = value
        return value, None

    def _moved(self, given: Any) -> Any:
        """Arguments with the device of the capture replaced."""
        return fx.node.map_aggregate(
            given, lambda a: DEVICE if isinstance(a, torch.device) and a.type in {*self.home, DEVICE.type} else a
        )


def _told_by_torch(gm: fx.GraphModule) -> Iterator[Offence]:
    """PyTorch's own tests, of the transplanted copy (private names, checked against torch 2.13.0)."""
    from torch._inductor.cudagraph_utils import check_multiple_devices_or_any_cpu_nodes
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    node = get_first_incompatible_cudagraph_node(gm)
    if node is not None:
        yield node, "PyTorch says that no CUDA graph can hold the op"
    devices = {tensor.device: node for node in gm.graph.nodes for tensor in meta.tensors(node)}
    told = check_multiple_devices_or_any_cpu_nodes(dict(devices)) if devices else None
    if told:
        yield next(iter(devices.values())), f"PyTorch says: {told}"
