# SPDX-License-Identifier: Apache-2.0
"""What the rewrite does to a model, without a process group and without running it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.collectives import Collective, is_collective
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.torch.decorator import ContextParallel
from pcp_passes.frontends.torch.executors import AXIS, Program, SimulatedExecutor
from pcp_passes.frontends.torch.fresh import FreshSpace
from pcp_passes.frontends.torch.options import TorchOptions
from pcp_passes.frontends.torch.plan import TokenPlan
from pcp_passes.frontends.torch.sharded import Variant
from pcp_passes.ir import meta
from pcp_passes.ir.printer import print_graph
from pcp_passes.ir.rules import op_name
from pcp_passes.passes.pipeline import PipelineReport

#: Arguments of transformers' models that hold tokens, and the dimension.
USUAL_TOKENS = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "attention_mask": -1}

Inputs = Mapping[str, Any] | Sequence[Any]


@dataclass(frozen=True, eq=False)
class InspectReport:
    """One graph of a model, before and after the rewrite.

    Attributes:
        pcp: number of ranks.
        tokens: T of the example.
        rows: M, rows of a rank for it, padding included.
        captured: the functional graph of all tokens; ``None`` when the graph runs whole on every rank.
        rewritten: the graph of one rank.
        passes: what each pass did, with its notes.
        collectives: of one call, in order; shapes and bytes are those of the example.
        replicated: why graphs run whole on every rank.
    """

    pcp: int
    tokens: int
    rows: int
    captured: fx.GraphModule | None
    rewritten: fx.GraphModule | None
    passes: PipelineReport | None
    collectives: tuple[Collective, ...]
    replicated: tuple[str, ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that each rank contributes to the collectives of one call."""
        return sum(collective.bytes for collective in self.collectives)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "pcp": self.pcp,
            "tokens": self.tokens,
            "rows": self.rows,
            "rewrites": self.passes.rewrites if self.passes else {},
            "notes": self._notes(),
            "collectives": [
                {"op": c.op, "shape": list(c.shape), "dtype": str(c.dtype), "bytes": c.bytes} for c in self.collectives
            ],
            "sent": self.sent,
            "replicated": list(self.replicated),
            "graph": print_graph(self.rewritten) if self.rewritten else None,
        }

    def lines(self) -> Iterator[str]:
        """The report as text, one line at a time; the graph is left out."""
        yield f"{self.pcp} ranks, {self.tokens} tokens, {self.rows} rows a rank"
        yield f"  {len(self.collectives)} collectives, {self.sent} bytes sent by each rank"
        for collective in self.collectives:
            yield f"    {collective}, {collective.bytes} bytes"
        for name, rewrites in (self.passes.rewrites if self.passes else {}).items():
            yield f"  {name}: {rewrites}"
        for note in self._notes():
            yield f"    {note}"
        for why in self.replicated:
            yield f"  replicated on every rank: {why}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _notes(self) -> list[str]:
        results = self.passes.results if self.passes else ()
        return [f"{name}: {note}" for name, result in results for note in result.notes]


class _Inspected(Exception):
    """Ends a call once its graph is made."""


@dataclass(frozen=True, eq=False)
class _InspectExecutor(SimulatedExecutor):
    def prepare(self, space: FreshSpace, gm: fx.GraphModule) -> Program:
        program: Program = gm.forward
        return program

    def run(self, program: Program, arguments: Sequence[Any], plan: TokenPlan) -> Sequence[Any]:
        raise _Inspected


def inspect_model(model: nn.Module, inputs: Inputs, pcp: int, **options: Any) -> InspectReport:
    """Capture and rewrite a model for ``pcp`` ranks, and report. The model may be on the ``meta`` device.

    Args:
        model: called with ``inputs``; left as it is.
        inputs: keyword arguments by name, or positional arguments.
        pcp: number of ranks.
        options: fields of :class:`~pcp_passes.frontends.torch.options.TorchOptions`. ``tokens`` may be left out when
            the arguments have the names that transformers gives them.

    Raises:
        ConfigError: an option is wrong, or no token argument is known.
        Refusal: the model cannot be sharded.
    """
    wrapped = _wrapped(model, inputs, _InspectExecutor(_ranks(pcp)), options)
    with contextlib.suppress(_Inspected):
        _call(wrapped, inputs)
    backend = wrapped.sharded.backend
    if not backend.graphs:
        return InspectReport(pcp, 0, 0, None, None, None, (), tuple(backend.replicated))
    return _report(pcp, backend.graphs[-1].variants[0], tuple(backend.replicated))


def simulated(model: nn.Module, pcp: int, **options: Any) -> ContextParallel:
    """A model that runs all ``pcp`` ranks in this process and returns what each of them would.

    Options as for :func:`inspect_model`, with ``tokens``; ``outputs="local"`` is a rank's own and refused.

    Raises ConfigError for a wrong option.
    """
    parsed = TorchOptions.parse(options)
    if parsed.outputs == "local":
        raise ConfigError('outputs="local" differs between ranks; a simulation returns "global" or "last" outputs.')
    return ContextParallel(model, parsed, SimulatedExecutor(_ranks(pcp), parsed.axis or AXIS))


def simulate_model(model: nn.Module, inputs: Inputs, pcp: int, **options: Any) -> Any:
    """Run a model on ``pcp`` simulated ranks; the model's own result type.

    Arguments and errors as for :func:`inspect_model`. The model is captured on each call: for several calls keep
    :func:`simulated`.
    """
    options.setdefault("tokens", _usual_tokens(inputs))
    return _call(simulated(model, pcp, **options), inputs)


def _wrapped(model: nn.Module, inputs: Inputs, executor: SimulatedExecutor, options: dict[str, Any]) -> ContextParallel:
    options.setdefault("tokens", _usual_tokens(inputs))
    return ContextParallel(model, TorchOptions.parse(options), executor)


def _ranks(pcp: int) -> int:
    if isinstance(pcp, bool) or not isinstance(pcp, int) or pcp < 1:
        raise ConfigError(f"pcp is the number of ranks, an integer of at least 1; found {pcp!r}.")
    return pcp


def _usual_tokens(inputs: Inputs) -> dict[str, int]:
    if not isinstance(inputs, Mapping):
        return {}
    held = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return {name: dim for name, dim in USUAL_TOKENS.items() if name in held and held[name].dim() >= 2}


def _call(model: nn.Module, inputs: Inputs) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def _report(pcp: int, variant: Variant, replicated: tuple[str, ...]) -> InspectReport:
    tokens, rows = next(iter(variant.accepted), (0, 0))
    if variant.rewritten is None or variant.captured is None:
        return InspectReport(pcp, tokens, rows, None, None, None, (), replicated)
    gm, space = variant.rewritten.gm, variant.captured.space
    collectives = tuple(_collective(node, space, tokens, rows) for node in gm.graph.nodes if is_collective(node))
    return InspectReport(pcp, tokens, rows, variant.captured.gm, gm, variant.rewritten.passes, collectives, replicated)


def _collective(node: fx.Node, space: FreshSpace, tokens: int, rows: int) -> Collective:
    operand = meta.tensor(node.args[0])
    assert operand is not None, f"%{node.name} gathers no tensor"
    shape = tuple(space.size_at(size, tokens, rows) for size in operand.shape)
    return Collective(op_name(node), str(node.args[2]), shape, operand.dtype)
