# SPDX-License-Identifier: Apache-2.0
"""From a Dynamo graph to functional ATen (private PyTorch names, checked against torch 2.13.0).

``aot_export_module(pre_dispatch=True, decompositions={})`` gives a graph without in-place ops in which attention,
``linear`` and ``matmul`` are single nodes. It is traced in a fresh shape environment, not in Dynamo's, so all sizes
are expressions of T and constants from the start, and all guards are ours to evaluate.

Dynamo's own module is read and never changed: Dynamo reads it again when the backend has returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_export_module

from pcp_passes.errors import Refusal
from pcp_passes.frontends.torch.fresh import FreshSpace, fake_inputs, fresh_space
from pcp_passes.frontends.torch.inputs import Expression, GraphInput, TokenChoice, choose_tokens, read_inputs
from pcp_passes.ir import meta
from pcp_passes.ir.copies import copy_graph, module_like
from pcp_passes.ir.places import behind


@dataclass(frozen=True, eq=False)
class DynamoGraph:
    """A copy of what Dynamo handed over, kept for as long as it may have to be captured again."""

    gm: fx.GraphModule
    inputs: tuple[GraphInput, ...]

    @classmethod
    def read(cls, gm: fx.GraphModule) -> DynamoGraph:
        """Copy the graph and describe its inputs while Dynamo's notes are still on the placeholders."""
        return cls(module_like(gm, copy_graph(gm)), read_inputs(gm))


@dataclass(frozen=True, eq=False)
class Capture:
    """A functional ATen graph of global tokens.

    Attributes:
        gm: placeholders one to one with Dynamo's, ``meta["val"]`` on every node, outputs flat.
        inputs: what the placeholders are.
        space: environment of all values.
        written: inputs whose new values are the first outputs, to be copied back after a call.
    """

    gm: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    space: FreshSpace
    written: tuple[int, ...] = ()


def symbol_values(inputs: Sequence[GraphInput], arguments: Sequence[Any]) -> dict[Expression, int]:
    """What Dynamo's symbols are in one call."""
    found: dict[Expression, int] = {}
    for given in inputs:
        for symbol, dim in given.places():
            argument = arguments[given.index]
            found[symbol] = _plain(argument if dim is None else argument.shape[dim])
    return found


def _plain(size: Any) -> int:
    """Inside a backend Dynamo gives sizes as ``SymInt``; ``int()`` of one would compile it as a constant."""
    return int(size.node.hint if isinstance(size, torch.SymInt) else size)


def float_values(inputs: Sequence[GraphInput], arguments: Sequence[Any]) -> dict[int, float]:
    """The Python floats among the arguments, by position."""
    return {given.index: float(arguments[given.index]) for given in inputs if given.kind == "float"}


def capture(
    graph: DynamoGraph | fx.GraphModule,
    arguments: Sequence[Any],
    *,
    rows: int,
    tokens: Mapping[str, int] | None = None,
    choice: TokenChoice | None = None,
) -> Capture:
    """Capture a Dynamo graph in a fresh environment.

    Args:
        graph: what a ``torch.compile`` backend was given. It is not changed.
        arguments: the inputs of a call: they give the hint of T, every other size, and the value of Python floats,
            which become constants of the graph.
        rows: hint of M, at least 2.
        tokens: named token dimensions, see :func:`~pcp_passes.frontends.torch.inputs.choose_tokens`.
        choice: the token symbols, when they are known already.

    Raises:
        ConfigError: the token dimension is ambiguous.
        Refusal: the graph writes into an input of token rows, or has an input that is neither a tensor nor a number.
    """
    source = graph if isinstance(graph, DynamoGraph) else DynamoGraph.read(graph)
    _refuse_other_inputs(source.inputs)
    found = choice or choose_tokens(source.inputs, tokens)
    assert found.symbols, f"no token dimension: {found.why_static}"
    sizes = symbol_values(source.inputs, arguments)
    space = fresh_space(next(sizes[symbol] for symbol in found.symbols), rows)
    values = {symbol: space.tokens if symbol in found.symbols else size for symbol, size in sizes.items()}
    module = _prepared(source.gm, float_values(source.inputs, arguments))
    fakes = fake_inputs(space, source.inputs, values)
    try:
        with space.ambient():
            exported, signature = aot_export_module(
                module, fakes, trace_joint=False, pre_dispatch=True, decompositions={}
            )
    except Exception as error:
        raise _no_functional_form(error) from error
    assert isinstance(exported, fx.GraphModule)
    written = _written(exported, source.inputs, signature)
    _unlift(exported, module, signature)
    _name_inputs(exported, source.inputs, fakes)
    _state_constants(exported, space)
    return Capture(exported, source.inputs, space, written)


def _no_functional_form(error: Exception) -> Refusal:
    """PyTorch's tracer fails in many ways: on a write into an input, on a higher-order op, on an op without a fake."""
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    executing = next((line.strip() for line in text.splitlines() if "While executing" in line), "")
    return Refusal(
        "this graph has no functional form, which the passes need: PyTorch could not trace it.",
        [
            ("found", f"{type(error).__name__}: {line}"),
            *([("node", executing)] if executing else []),
            ("next", 'change the model there (a write into an input is the usual reason), or unknown="replicate" runs'),
            ("", "this graph on every rank as it is"),
        ],
    )


def _refuse_other_inputs(inputs: Sequence[GraphInput]) -> None:
    others = [given for given in inputs if given.kind == "other"]
    if others:
        raise Refusal(
            f"{len(others)} inputs of this graph are neither plain tensors nor numbers.",
            [("input", given.source) for given in others]
            + [
                ("next", "give the model plain tensors (no DTensor), and keep other"),
                ("", "objects out of the function that is compiled"),
            ],
        )


def _prepared(gm: fx.GraphModule, floats: Mapping[int, float]) -> fx.GraphModule:
    """A copy in which reading a Python float gives its value, and that sets no mode which is set already.

    The placeholders of floats stay, unused.
    """
    graph = copy_graph(gm)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, value in floats.items():
        for item in list(placeholders[index].users):
            _replace_by_constant(item, value)
    for node in reversed(graph.nodes):
        meta.forget_unbacked(node)
        if _changes_nothing(node):
            graph.erase_node(node)
    return module_like(gm, graph)


def _changes_nothing(node: fx.Node) -> bool:
    """Gradients are off throughout; a region without autocast says nothing where autocast is off."""
    if node.target is torch._C._set_grad_enabled:
        return True
    if node.target is torch.amp.autocast_mode._exit_autocast:
        entered = node.args[0]
        return isinstance(entered, fx.Node) and _autocast_off(entered)
    return node.target is torch.amp.autocast_mode._enter_autocast and not node.users and _autocast_off(node)


def _autocast_off(entered: fx.Node) -> bool:
    device, _, enabled, _ = entered.args
    return not enabled and not torch.is_autocast_enabled(str(device))


def _replace_by_constant(item: fx.Node, value: float) -> None:
    for user in list(item.users):
        user.args = fx.node.map_arg(user.args, lambda n: value if n is item else n)
        user.kwargs = fx.node.map_arg(user.kwargs, lambda n: value if n is item else n)
    item.graph.erase_node(item)


def _written(gm: fx.GraphModule, inputs: Sequence[GraphInput], signature: Any) -> tuple[int, ...]:
    """Inputs that the graph writes: the functional form returns their new values in front of its outputs.

    Such a value is whole, the same on every rank, and copied back after the call; not so the rows of an input of token
    rows, which are somebody else's.
    """
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"][-len(inputs) :]
    by_name = dict(zip(names, inputs, strict=True))
    lifted = [*signature.buffers_to_mutate.values(), *getattr(signature, "parameters_to_mutate", {}).values()]
    written = [by_name[name] for name in signature.user_inputs_to_mutate.values()]
    of_tokens = [given.source for given in written if given.symbols()]
    if not lifted and not of_tokens:
        return tuple(given.index for given in written)
    raise Refusal(
        f"this graph writes into {len(lifted) + len(of_tokens)} of its inputs, which no rank may do alone.",
        [("input", name) for name in [*of_tokens, *lifted]]
        + [("next", "return the new value instead of writing it: call the model in eval mode and without a cache"),
           ("", "(for transformers: model.eval(), use_cache=False)")],
    )  # fmt: skip


def _unlift(gm: fx.GraphModule, module: fx.GraphModule, signature: Any) -> None:
    """Turn parameters and buffers that Dynamo left on the module back from inputs into attributes."""
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in [node for node in gm.graph.nodes if node.op == "placeholder"]:
        if node.name not in lifted:
            continue
        target = f"_captured_{lifted[node.name].replace('.', '_')}"
        if node.name in signature.inputs_to_parameters:
            gm.register_parameter(target, module.get_parameter(lifted[node.name]))
        else:
            gm.register_buffer(target, module.get_buffer(lifted[node.name]))
        with gm.graph.inserting_before(behind(node)):
            own = gm.graph.get_attr(target)
        meta.duplicate(node, own)
        node.replace_all_uses_with(own)
        gm.graph.erase_node(node)


def _name_inputs(gm: fx.GraphModule, inputs: Sequence[GraphInput], fakes: Sequence[Any]) -> None:
    """Call placeholders by what they are to the user, and give constants among them their value."""
    for node, given, fake in zip(gm.graph.find_nodes(op="placeholder"), inputs, fakes, strict=True):
        node._rename(given.source.replace(".size().", "_size_"))
        node.target = node.name
        if not meta.has_value(node):
            meta.set_aten_value(node, fake)
    gm.recompile()


def _state_constants(gm: fx.GraphModule, space: FreshSpace) -> None:
    """Tracing leaves constants that are attributes without a value of the fresh environment."""
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        held: Any = gm
        for part in str(node.target).split("."):
            held = getattr(held, part)
        if isinstance(held, torch.Tensor):
            with space.ambient():
                meta.set_aten_value(node, space.fake_mode.from_tensor(held, static_shapes=True))
