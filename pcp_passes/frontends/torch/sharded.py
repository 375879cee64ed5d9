# SPDX-License-Identifier: Apache-2.0
"""One Dynamo graph, sharded: captured and rewritten on its first call, and again when an assumption breaks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from pcp_passes.dumps import claim_folder, dump_folder
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch.capture import Capture, DynamoGraph, capture
from pcp_passes.frontends.torch.executors import Executor, Program
from pcp_passes.frontends.torch.guards import CallKey, ValueGuard, read_call, value_guards
from pcp_passes.frontends.torch.inputs import TokenChoice
from pcp_passes.frontends.torch.options import TorchOptions
from pcp_passes.frontends.torch.plan import PlanCache, TokenPlan
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.passes import Observer, PassContext
from pcp_passes.passes.observers import DumpObserver, TimeObserver, VerifyObserver
from pcp_passes.passes.tokens.pipeline import Rewritten, TokenOptions, rewrite_tokens

logger = logging.getLogger(__name__)

MAX_VARIANTS = 16
"""A model that needs more than this compiles on nearly every call; the oldest is forgotten."""


@dataclass(frozen=True, eq=False)
class Variant:
    """One compilation of a graph, and what it assumes.

    Attributes:
        key: constants of the graph.
        captured: the graph before the rewrite, and the environment with the guards; ``None`` where there is none.
        rewritten: the graph that runs; ``None`` for one that every rank runs whole.
        program: what runs it.
        assumed: inputs taken for what they held.
        token_outputs: pairs (output, dimension) of T rows. They are marked dynamic, since after a graph break they are
            the inputs of the next graph.
        accepted: pairs (T, M) whose guards have been evaluated and hold.
    """

    key: CallKey
    captured: Capture | None
    rewritten: Rewritten | None
    program: Program
    assumed: tuple[ValueGuard, ...] = ()
    token_outputs: tuple[tuple[int, int], ...] = ()
    accepted: set[tuple[int, int]] = field(default_factory=set)

    def why_not(self, key: CallKey, plan: TokenPlan, arguments: Sequence[Any]) -> str | None:
        """The assumption that keeps this variant from serving a call; ``None`` when it may."""
        if key != self.key:
            return f"constants of the graph are {self.key}, found {key}"
        lengths = plan.num_tokens, plan.num_rows
        if self.captured is not None and lengths not in self.accepted:
            broken = self.captured.space.broken_guards(*lengths)
            if broken:
                return f"guard {broken[0]} does not hold for T = {lengths[0]}, M = {lengths[1]}"
            self.accepted.add(lengths)
        return next((why for guard in self.assumed if (why := guard.broken(arguments))), None)


class ShardedGraph:
    """The callable that replaces one Dynamo graph.

    Nothing is captured before the first call: only then are all hints real numbers, and an error reaches the user as
    it is instead of wrapped by Dynamo.

    Args:
        graph: what Dynamo handed over.
        choice: which of its symbols are the token count.
        options: what the user asked for.
        executor: who runs the result.
        name: of the graph, for messages and dumps.
        resumed: the graph follows a graph break: a call whose sizes are not one token count runs it whole.
    """

    def __init__(
        self,
        graph: DynamoGraph,
        choice: TokenChoice,
        options: TorchOptions,
        executor: Executor,
        name: str = "graph",
        *,
        resumed: bool = False,
    ) -> None:
        self.resumed = resumed
        self.graph, self.choice, self.options, self.executor, self.name = graph, choice, options, executor, name
        self.variants: list[Variant] = []
        self.compilations = 0
        self.rows: torch.Tensor | None = None
        self._plans = PlanCache(executor.pcp, options.layout)
        self._varying = tuple(given for given in graph.inputs if given.kind == "float" or given.places())
        self._first_rows = next(
            (given.index for given in self._varying if choice.symbols & set(given.size)), self._varying[0].index
        )

    def __call__(self, *arguments: Any) -> Sequence[Any]:
        """Run one call; T is read from the arguments."""
        try:
            tokens, key = read_call(self._varying, self.choice, arguments)
        except ConfigError:
            if not self.resumed:
                raise
            with torch.no_grad():
                whole: Sequence[Any] = self.graph.gm.forward(*arguments)
            return whole
        plan = self._plans.get(tokens, _device_of(arguments[self._first_rows]))
        variant = self._variant(key, plan, arguments)
        self.rows = self.executor.local_rows(plan)
        if variant.rewritten is None:
            with torch.no_grad():
                outputs: Sequence[Any] = variant.program(*arguments)
        else:
            outputs = _write_back(self.executor.run(variant.program, arguments, plan), variant.captured, arguments)
        for index, dim in variant.token_outputs:
            torch._dynamo.maybe_mark_dynamic(outputs[index], dim)
        return outputs

    def _variant(self, key: CallKey, plan: TokenPlan, arguments: Sequence[Any]) -> Variant:
        why = "first call"
        for place, variant in enumerate(self.variants):
            refused = variant.why_not(key, plan, arguments)
            if refused is None:
                self.variants.insert(0, self.variants.pop(place))
                return variant
            why = refused
        logger.info("%s: capturing for T = %d, M = %d: %s", self.name, plan.num_tokens, plan.num_rows, why)
        made = self._make(key, plan, arguments)
        self.variants.insert(0, made)
        del self.variants[MAX_VARIANTS:]
        return made

    def _make(self, key: CallKey, plan: TokenPlan, arguments: Sequence[Any]) -> Variant:
        try:
            captured = capture(self.graph, arguments, rows=plan.num_rows, choice=self.choice)
        except Refusal as refused:
            if self.options.unknown != "replicate":
                raise
            logger.warning("%s runs replicated on every rank: %s", self.name, refused.headline)
            return Variant(key, None, None, self.graph.gm.forward)
        special = captured.space.specialised()
        if special:
            return self._whole(key, captured, "; ".join(special))
        guards = value_guards(captured.gm.graph, captured.inputs, arguments)
        assumed = tuple(guards.values())
        rewritten = self._rewrite(captured, {name: guard.assumption for name, guard in guards.items()})
        self._agree(rewritten.gm, plan)
        program = self.executor.prepare(captured.space, rewritten.gm)
        self.compilations += 1
        outputs = tuple(_token_dims(rewritten.gm, captured.space.tokens, len(captured.written)))
        return Variant(key, captured, rewritten, program, assumed, outputs, {(plan.num_tokens, plan.num_rows)})

    def _rewrite(self, captured: Capture, assume: dict[str, Any]) -> Rewritten:
        context = PassContext(pcp=self.executor.pcp, axis=self.executor.axis)
        asked = self.options
        options = TokenOptions(
            outputs=asked.outputs,
            replicate=asked.replicate,
            unknown=asked.unknown,
            balance=asked.balance,
            assume=tuple(assume.items()),
        )
        return rewrite_tokens(captured.gm, captured.space, context, options=options, observers=self._observers())

    def _whole(self, key: CallKey, captured: Capture, why: str) -> Variant:
        """Every rank runs the graph as it is, when the user allows it."""
        if self.options.unknown != "replicate":
            raise Refusal(
                f"{self.name} holds for one length only, so its tokens cannot be split.",
                [("found", why), ("required", "a graph for any number of tokens"),
                 ("next", 'do not compare the length with a constant there; or unknown="replicate" runs all tokens'),
                 ("", "on every rank")],
            )  # fmt: skip
        logger.warning("%s runs replicated on every rank: %s", self.name, why)
        return Variant(key, captured, None, self.graph.gm.forward)

    def _agree(self, gm: fx.GraphModule, plan: TokenPlan) -> None:
        facts = {
            "options": self.options.digest(),
            "torch": torch.__version__,
            "graph": graph_fingerprint(gm),
            "tokens": str(plan.num_tokens),
        }
        self.executor.agree("graph", facts, {"graph": print_graph(gm)}, self.options.agreement_s)

    def _observers(self) -> list[Observer]:
        observers: list[Observer] = [TimeObserver()]
        if self.options.verify != "off":
            observers.append(VerifyObserver(self.options.verify))
        folder = dump_folder(self.options.dump)
        if folder is not None and self.executor.rank == 0:  # the text is the same on every rank
            observers.append(DumpObserver(claim_folder(folder)))
        return observers


def _write_back(outputs: Sequence[Any], captured: Capture | None, arguments: Sequence[Any]) -> Sequence[Any]:
    """Copy new values of inputs back into them; the outputs that remain are the caller's."""
    written = captured.written if captured is not None else ()
    for index, value in zip(written, outputs, strict=False):
        arguments[index].copy_(value)
    return outputs[len(written) :]


def _token_dims(gm: fx.GraphModule, tokens: torch.SymInt, skipped: int) -> Iterator[tuple[int, int]]:
    """Outputs with T rows, and the dimension; the first ``skipped`` are not the caller's."""
    (output,) = gm.graph.find_nodes(op="output")
    for index, node in enumerate(output.args[0][skipped:]):
        held = meta.tensor(node)
        sizes = () if held is None else held.shape
        yield from ((index, dim) for dim, size in enumerate(sizes) if fakes.same_size(size, tokens))


def _device_of(argument: Any) -> torch.device:
    """Where the plan goes: to the token rows; a graph that is given only their number runs on the CPU."""
    return argument.device if isinstance(argument, torch.Tensor) else torch.device("cpu")
