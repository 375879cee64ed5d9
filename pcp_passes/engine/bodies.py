# SPDX-License-Identifier: Apache-2.0
"""From a module over token rows to its bodies: one capture, one graph per layout variant.

A module that can become a body takes tensors of N stacked token rows, ``ids i64[N]``, ``positions i64[N]`` and for a
drafter ``hidden [N, H]``, and touches the sequence through the ops of :mod:`pcp_passes.paged` only. Capture gives a
functional ATen graph with one symbolic size, N; :func:`~pcp_passes.passes.build_variants` makes the bodies of it.
"""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch._functorch.aot_autograd import aot_export_module
from torch.overrides import TorchFunctionMode

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch.fresh import FreshSpace, fresh_space
from pcp_passes.ir import meta
from pcp_passes.ir.copies import copy_graph, copy_graph_module, module_like
from pcp_passes.paged.records import Store
from pcp_passes.passes import PassContext, Pipeline, build_variants
from pcp_passes.passes.bodies.dispatch_experts import MADE, DispatchExperts, has_experts
from pcp_passes.passes.bodies.lower_index_prologue import LowerIndexPrologue
from pcp_passes.passes.bodies.lower_sparse_index import LowerSparseIndex
from pcp_passes.passes.bodies.pack_records import PackRecords


@dataclass(frozen=True, eq=False)
class Model:
    """A target or a drafter, captured.

    Parameters and buffers are attributes of the graph modules, shared between variants and with the module that was
    captured.
    """

    name: str
    """``"target"`` or ``"drafter"``."""
    bodies: Mapping[str, fx.GraphModule]
    """``"sharded"`` and ``"replicated"``: ``(ids, positions)`` or ``(ids, positions, hidden)`` to hidden ``[N, H]``, or
    to a tuple of it and extra tensors ``[N, ..]``. A drafter that shares its top-k has ``"replicated_shared"`` too."""
    head: nn.Module
    """``[L, H]`` to logits ``[L, V]``."""
    hidden_size: int
    vocab_size: int
    layers: tuple[str, ...]
    """Names of its cache layers: ``"target.0"``, ..."""
    dtype: torch.dtype
    topk: int = 0
    """Size of the top-k that the bodies return beside the hidden states; 0 when they do not."""
    aux_layers: tuple[int, ...] = ()
    """Decoder layers whose outputs ``[N, H]`` the bodies return behind the hidden states."""
    source: str = ""
    """What was captured, for messages: ``"GlmMoeDsaForCausalLM"``."""
    captured: Mapping[str, fx.GraphModule] = field(default_factory=dict)
    """The graph that the bodies were made of, under ``""``, and others by the name of their one body."""
    store: Store = "native"
    """What the bodies write of a token into the caches of an MLA layer, and gather."""
    dp: int = 0
    """Replicas whose ranks share the experts with those of the PCP axis; 0 where each rank has all experts."""

    def over(self, ctx: PassContext, store: Store | None = None, dp: int | None = None) -> Model:
        """The same model with bodies for another number of ranks, other records, or dispatched experts; a fraction of
        a capture."""
        store, dp = self.store if store is None else store, self.dp if dp is None else dp
        bodies = make_bodies(self.captured, ctx, store, dp=dp, name=self.name)
        return replace(self, bodies=bodies, store=store, dp=dp)

    @property
    def has_experts(self) -> bool:
        """Whether the capture has experts, which a mesh can share."""
        return has_experts(self.captured.values())


def capture(
    module: nn.Module, example_inputs: Sequence[torch.Tensor], ctx: PassContext, store: Store = "native"
) -> dict[str, fx.GraphModule]:
    """Both bodies of a module: ``{"sharded": ..., "replicated": ...}``, the same graph text on every rank.

    A float64 module stays float64: where it converts to float32 on its own (norms, rope, routers and indexers of
    transformers do), the graph keeps float64. A rounding in between would turn differences of 1e-16 between layouts
    into differences of 1e-7.

    Args:
        module: in eval mode; its inputs and outputs are as the module's text says.
        example_inputs: tensors whose first size is the same N, at least 2 and above every constant that the module
            compares it with (``index_topk``). Only dtypes and sizes are read.
        ctx: axis and size.
        store: what a record of an MLA layer holds, see :mod:`pcp_passes.paged.records`.

    Raises:
        ConfigError: example inputs that do not share their first size.
        Refusal: the module cannot be captured with a symbolic row count, or mixes rows outside the paged ops.
    """
    return make_bodies({"": prepare(module, example_inputs)}, ctx, store)


def make_bodies(
    captured: Mapping[str, fx.GraphModule],
    ctx: PassContext,
    store: Store = "native",
    *,
    dp: int = 0,
    name: str = "target",
) -> dict[str, fx.GraphModule]:
    """Both bodies of the graph named ``""``, and the replicated body, under its own name, of any other.

    Args:
        captured: by name.
        ctx: axis and size.
        store: what a record of an MLA layer holds.
        dp: replicas that share experts, with ``ctx.pcp`` ranks each; 0 leaves all experts on each rank.
        name: of the model, in front of the names of its experts.
    """
    bodies: dict[str, fx.GraphModule] = {}
    for body_name, graph in captured.items():
        packed = copy_graph_module(graph)
        Pipeline((PackRecords(store), LowerIndexPrologue())).run(packed, ctx)
        made = build_variants(packed, ctx)
        if dp:
            made = {
                variant: _dispatching(body, replace(ctx, variant=variant), dp, name) for variant, body in made.items()
            }
        bodies.update({body_name: made["replicated"]} if body_name else {str(one): body for one, body in made.items()})
    return bodies


def _dispatching(body: fx.GraphModule, ctx: PassContext, dp: int, name: str) -> fx.GraphModule:
    """The body with its experts dispatched; in a module of its own, which no longer holds their weights."""
    graph = copy_graph(body)
    Pipeline((DispatchExperts(dp, model=name),), given=MADE).run_graph(graph, ctx)
    return module_like(body, graph)


def prepare(module: nn.Module, example_inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """What :func:`capture` makes bodies of: the functional graph with sparse indexers lowered."""
    graph = trace(module, example_inputs)
    Pipeline((LowerSparseIndex(),)).run(graph, PassContext(1))
    return graph


def trace(module: nn.Module, example_inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The functional graph of ``module`` with one symbolic size, before any pass.

    Raises:
        ConfigError, Refusal: as :func:`capture`.
    """
    counts = {len(given) if given.dim() else 0 for given in example_inputs}
    if len(counts) != 1 or min(counts) < 2:
        raise ConfigError(f"example inputs have {sorted(counts)} rows; required one count of at least 2 for all")
    space = fresh_space(2, counts.pop())
    with space.fake_mode:
        fakes = [given.new_empty((space.rows, *given.shape[1:]), device=given.device) for given in example_inputs]
    root = _Flat(module)
    try:
        with space.ambient():
            exported, signature = aot_export_module(
                root, fakes, trace_joint=False, pre_dispatch=True, decompositions={}
            )
    except Refusal:
        raise
    except Exception as error:
        raise Refusal(
            f"{type(module).__name__} cannot be captured over token rows",
            [("found", f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"),
             *_place_of(error),
             ("next", "write the module with functional ops that read no value, make its tensors on the device of an "
              "input, and reach the sequence through pcp_passes.paged")],
        ) from error  # fmt: skip
    if any(place.startswith("M ") for place in space.specialised()):
        raise Refusal(
            f"{type(module).__name__} was captured for one row count only",
            [("found", "; ".join(space.specialised())), ("next", "remove what compares the row count with a constant")],
        )
    assert isinstance(exported, fx.GraphModule)
    _require_functional(signature, type(module).__name__)
    _tidy(exported, root, signature, space)
    return exported


def _place_of(error: Exception) -> list[tuple[str, str]]:
    """The innermost line that is neither PyTorch's nor this file's: what the module did when it failed."""
    skipped = (os.path.dirname(torch.__file__) + os.sep, __file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(skipped)]
    return [("source", f"{os.path.basename(f.filename)}:{f.lineno}  {f.line}") for f in frames[-1:]]


_TRACER_ONLY = (torch._C._set_grad_enabled, torch.ops.aten._assert_tensor_metadata.default)
"""Without effect in a body: gradients are off throughout, and dtypes are as captured."""


class _Flat(nn.Module):
    """Outputs as a tuple, which is all that an exported graph can have."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.body = module
        self.names = list(inspect.signature(module.forward).parameters)
        self.bare = True
        self.dtype = _dtype_of(module)

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with keeping_double(self.dtype):
            result = self.body(*args)
        self.bare = isinstance(result, torch.Tensor)
        return (result,) if isinstance(result, torch.Tensor) else tuple(result)


class _KeepDouble(TorchFunctionMode):
    """Reads every request for float32 as one for float64."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):  # a call of the tracer
            return func(*args, **(kwargs or {}))
        func = torch.Tensor.double if func is torch.Tensor.float else func
        widened = {name: _wide(held) for name, held in (kwargs or {}).items()}
        return func(*(_wide(held) for held in args), **widened)


def _wide(held: Any) -> Any:
    return torch.float64 if held is torch.float32 else held


@contextmanager
def keeping_double(dtype: torch.dtype = torch.float64) -> Iterator[None]:
    """Run an eager float64 module as its capture runs: what it converts to float32 stays float64."""
    if dtype != torch.float64:
        yield
        return
    with _KeepDouble():
        yield


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((held.dtype for held in module.parameters() if held.is_floating_point()), torch.get_default_dtype())


def _require_functional(signature: Any, name: str) -> None:
    written = [*signature.buffers_to_mutate.values(), *signature.user_inputs_to_mutate.values()]
    if written:
        raise Refusal(
            f"{name} writes into {len(written)} of its inputs or buffers, which a body may not",
            [("found", ", ".join(map(str, written))), ("next", "return new values; caches are written by paged ops")],
        )


def _tidy(gm: fx.GraphModule, root: _Flat, signature: Any, space: FreshSpace) -> None:
    """Parameters back to attributes under their own names, inputs under theirs, no gradient switches, bare output."""
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = iter(root.names)
    first = next(node for node in gm.graph.nodes if node.op != "placeholder")
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name not in lifted:
            node._rename(next(names))
            node.target = node.name
            continue
        held = lifted[node.name]
        target = _attach(gm, root, held.removeprefix("body."), held)
        with gm.graph.inserting_before(first):
            own = gm.graph.get_attr(target)
        meta.duplicate(node, own)
        node.replace_all_uses_with(own)
        gm.graph.erase_node(node)
    for node in gm.graph.nodes:
        if node.target in _TRACER_ONLY:
            node.graph.erase_node(node)
    for node in gm.graph.find_nodes(op="get_attr"):
        if not meta.has_value(node):
            held_tensor = _at(gm, str(node.target))
            meta.set_aten_value(node, space.fake_mode.from_tensor(held_tensor, static_shapes=True))
    output = gm.graph.output_node()
    if root.bare:
        results: Any = output.args[0]
        output.args = (results[0],)
    gm.graph.eliminate_dead_code()
    gm.graph._codegen = fx.graph.CodeGen()
    gm.delete_all_unused_submodules()
    gm.recompile()


def _attach(gm: fx.GraphModule, root: nn.Module, name: str, held: str) -> str:
    """Hang a parameter or buffer of ``root`` on ``gm`` under its own dotted name."""
    owner: nn.Module = gm
    *path, leaf = name.split(".")
    for part in path:
        if not isinstance(getattr(owner, part, None), nn.Module):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    tensor = _at(root, held)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(leaf, tensor)
    else:
        owner.register_buffer(leaf, tensor, persistent=False)
    return name


def _at(root: nn.Module, path: str) -> Any:
    held: Any = root
    for part in path.split("."):
        held = getattr(held, part)
    return held
