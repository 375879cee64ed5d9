# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="pcp", options={...})``, and what the decorator compiles with."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pcp_passes.errors import PcpError, Refusal
from pcp_passes.frontends.torch.capture import DynamoGraph, symbol_values
from pcp_passes.frontends.torch.executors import Executor, GroupExecutor
from pcp_passes.frontends.torch.inputs import GraphInput, TokenChoice, choose_resumed, choose_tokens, unknown_names
from pcp_passes.frontends.torch.options import TorchOptions
from pcp_passes.frontends.torch.sharded import ShardedGraph

logger = logging.getLogger(__name__)

Compiled = Callable[..., Any]

_numbers = itertools.count()


@dataclass(eq=False)
class PcpBackend:
    """A ``torch.compile`` backend for one model: keeps the graphs that it was given.

    Attributes:
        options: what the user asked for.
        make_executor: gives the executor, on the first graph.
        graphs: the sharded graphs, in the order Dynamo made them.
        replicated: for each graph that every rank runs whole, why.
        names_checked: the names in ``options.tokens`` are arguments of the model; a graph that reads none of them is
            then not mistaken for one.
    """

    options: TorchOptions
    make_executor: Callable[[], Executor]
    graphs: list[ShardedGraph] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    names_checked: bool = False

    @property
    def compilations(self) -> int:
        """How often a graph was captured, rewritten and prepared."""
        return sum(graph.compilations for graph in self.graphs)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Compiled:
        """Dynamo's entry point. Errors are raised by the first call of what is returned, so that they arrive as they
        are: Dynamo wraps what a backend raises."""
        try:
            return self._compile(gm, example_inputs)
        except PcpError as error:
            return _raiser(error)

    def _compile(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Compiled:
        graph = DynamoGraph.read(gm)
        name = f"graph-{next(_numbers)}"
        resumed = self._resumed(graph.inputs)
        choice = (
            choose_resumed(graph.inputs, symbol_values(graph.inputs, example_inputs))
            if resumed
            else choose_tokens(graph.inputs, self.options.tokens)
        )
        if choice.symbols:
            sharded = ShardedGraph(graph, choice, self.options, self.make_executor(), name, resumed=resumed)
            self.graphs.append(sharded)
            return sharded
        why = choice.why_static if resumed else self._why_whole(graph.inputs, choice, name)
        logger.info("%s runs replicated on every rank: %s", name, why)
        self.replicated.append(why)
        return _as_captured(gm, example_inputs, self.options.inner)

    def _resumed(self, inputs: Sequence[GraphInput]) -> bool:
        """Whether the graph is what follows a graph break: it reads none of the named arguments, an earlier one did.

        Running such a graph whole is always right, so it is never refused for its sizes.
        """
        names = set(self.options.tokens)
        read = any(given.source in names or given.last_name in names for given in inputs)
        return bool(names) and not read and bool(self.names_checked or self.graphs or self.replicated)

    def _why_whole(self, inputs: Sequence[GraphInput], choice: TokenChoice, name: str) -> str:
        """Why a graph without token count may run whole on every rank. Raises Refusal when it may not."""
        data = [given for given in inputs if given.kind == "tensor" and not given.is_parameter]
        named = [
            (given, dim) for key, dim in self.options.tokens.items() for given in data
            if key in (given.source, given.last_name)
        ]  # fmt: skip
        sizes = [given.size[dim] for given, dim in named] if named else [size for g in data for size in g.size]
        if all(size < 2 for size in sizes):
            return "one token" if sizes else "no input that could hold tokens"
        if self.options.unknown == "replicate":
            return choice.why_static
        wrong = unknown_names(self.options.tokens, inputs) if self.options.tokens else None
        raise Refusal(
            f"{name} has no dynamic number of tokens, so its tokens cannot be split.",
            [("found", choice.why_static)]
            + [("input", f"{given.source} {list(given.size)}") for given in data]
            + ([("tokens", str(wrong))] if wrong else [])
            + [("next", "torch.compile(..., dynamic=True), or @context_parallel(tokens={...}), which marks the token"),
               ("", "dimension itself; if the model was compiled so, it compares its length with a constant;"),
               ("", 'unknown="replicate" runs such a graph whole on every rank')],
        )  # fmt: skip


def pcp_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None
) -> Compiled:
    """The backend ``"pcp"``: each graph that Dynamo makes is sharded over a process group.

    ``options`` are those of :class:`~pcp_passes.frontends.torch.options.TorchOptions`.
    """
    try:
        parsed = TorchOptions.parse(options)
    except PcpError as error:
        return _raiser(error)
    return PcpBackend(parsed, lambda: GroupExecutor.of(parsed))(gm, example_inputs)


def _raiser(error: PcpError) -> Compiled:
    def refused(*_: Any) -> Any:
        raise error.with_traceback(None)

    return refused


def _as_captured(gm: fx.GraphModule, example_inputs: Sequence[Any], inner: str) -> Compiled:
    if inner == "eager":
        forward: Compiled = gm.forward
        return forward
    from torch._inductor.compile_fx import compile_fx

    with torch.no_grad():
        compiled: Any = compile_fx(gm, list(example_inputs))
    return compiled  # type: ignore[no-any-return]
