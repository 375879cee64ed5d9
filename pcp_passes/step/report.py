# SPDX-License-Identifier: Apache-2.0
"""What a step program moves, read off the program: collectives, restored rows, what lies between target and drafter.

Nothing runs. Sizes of nodes are expressions of the step's counts (``M`` rows a rank, ``T`` tokens, ``L`` logit rows,
``S`` of them on the rank with most, ``R`` requests), so one program is counted for any batch; what it says of bytes and
calls is what :func:`pcp_passes.collectives.record_collectives` counts when the step runs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import fx

from pcp_passes.collectives import is_collective
from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta
from pcp_passes.layout import Layout, sampled_rows
from pcp_passes.step import ops
from pcp_passes.step.placement import body_of, row_operands
from pcp_passes.step.program import StepProgram


@dataclass(frozen=True)
class StepSizes:
    """Counts of one step."""

    tokens: int
    """T."""
    rows: int
    """M."""
    logit_rows: int
    """L."""
    sampled: int
    """S."""
    requests: int
    """R."""


def sizes_of(layout: Layout, logit_rows: ArrayLike) -> StepSizes:
    """The counts of a batch; ``logit_rows`` as for :func:`pcp_passes.step.plan_inputs`."""
    sampled = sampled_rows(layout, logit_rows)
    return StepSizes(
        layout.num_tokens, layout.padded_tokens, len(sampled.restore), sampled.padded_rows, layout.batch.num_requests
    )


@dataclass(frozen=True)
class CallLine:
    """One call of a body."""

    body: str
    """``drafter.sharded``."""
    rows: int
    """Rows that a rank runs."""
    collectives: int
    bytes: int
    """That a rank sends."""


@dataclass(frozen=True)
class RestoreLine:
    """Rows of a sharded call that all ranks get in global order."""

    source: str
    """The call they come from."""
    restored: int
    """Rows that every rank has afterwards."""
    sent: int
    """Rows that a rank sends."""
    bytes: int
    """That a rank sends."""


@dataclass(frozen=True)
class Boundary:
    """Between the target and the first draft pass. ``None`` fields: there is no sharded draft pass."""

    nodes: tuple[str, ...]
    """Calls that the target's hidden states go through before the drafter reads them."""
    bytes: int
    """That a rank sends there."""
    same_inputs: bool
    """Whether both calls read one set of attention inputs."""
    same_tokens: bool
    """Whether the drafter's tokens are written over the target's."""

    @property
    def copies(self) -> int:
        """Tensors made on the way."""
        return len(self.nodes)


@dataclass(frozen=True)
class StepReport:
    """What a step does on each rank."""

    pcp: int
    drafts: int
    sizes: StepSizes
    calls: tuple[CallLine, ...]
    restores: tuple[RestoreLine, ...]
    broadcasts: int
    """Collectives that only make ranks agree (``verify_tokens="broadcast"``)."""
    collectives: int
    """All of the step, those of bodies included."""
    bytes: int
    """That a rank sends in all of them."""
    boundary: Boundary | None

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        found = asdict(self)
        if self.boundary is not None:
            found["boundary"]["copies"] = self.boundary.copies
        return found


def step_report(
    program: StepProgram, sizes: StepSizes, *, sharded: bool = True, times: Mapping[str, int] | None = None
) -> StepReport:
    """Count one step.

    Args:
        program: the program.
        sizes: of the batch; ``rows`` and ``sampled`` are not read for the plain program.
        sharded: ``False`` counts the plain program: a replicated or dummy step.
        times: by cache layer, how many layers of the model a captured one stands for; once by default.

    Raises:
        ConfigError: the sharded program of one rank is asked for.
    """
    gm = program.sharded if sharded else program.plain
    if gm is None:
        raise ConfigError("a step program of pcp=1 has no sharded part; count its plain one")
    counted = _Counted(gm, sizes, times or {})
    calls = tuple(counted.call(node) for node in gm.graph.nodes if body_of(node))
    own = [node for node in gm.graph.nodes if is_collective(node)]
    restores = tuple(line for node in own for line in counted.restores(node))
    return StepReport(
        program.pcp, program.steps, sizes, calls, restores, len(own) - len(restores),
        len(own) + sum(call.collectives for call in calls),
        sum(counted.sent(node) for node in own) + sum(call.bytes for call in calls), counted.boundary(),
    )  # fmt: skip


class _Counted:
    def __init__(self, gm: fx.GraphModule, sizes: StepSizes, times: Mapping[str, int]) -> None:
        self.gm, self.times = gm, times
        self.known = {
            "sT": sizes.tokens, "sM": sizes.rows, "sL": sizes.logit_rows, "sS": sizes.sampled, "sR": sizes.requests
        }  # fmt: skip

    def size(self, held: Any, rows: int | None = None) -> int:
        """A size for the step's counts; a body's own row count is ``rows``."""
        if not isinstance(held, torch.SymInt):
            return int(held)
        symbols = held.node.expr.free_symbols
        values = {symbol: self.known[str(symbol)] if rows is None else rows for symbol in symbols}
        return int(held.node.expr.subs(values))

    def bytes_of(self, value: torch.Tensor, rows: int | None = None) -> int:
        count = value.element_size()
        for size in value.shape:
            count *= self.size(size, rows)
        return count

    def sent(self, collective: fx.Node, rows: int | None = None) -> int:
        operand = meta.tensor(collective.args[0])
        assert operand is not None, f"%{collective.name} gathers no tensor"
        return self.bytes_of(operand, rows)

    def call(self, node: fx.Node) -> CallLine:
        body = body_of(node)
        first = meta.tensor(row_operands(node)[0])
        assert body is not None and first is not None
        rows = self.size(first.shape[0])
        gathers = [
            (self.times.get(meta.info(inner).layer or "", 1), self.sent(inner, rows))
            for inner in body.body.graph.nodes
            if is_collective(inner)
        ]
        count, sent = sum(times for times, _ in gathers), sum(times * sent for times, sent in gathers)
        return CallLine(str(node.target), rows, count, sent)

    def restores(self, collective: fx.Node) -> Iterator[RestoreLine]:
        """One line, or none for a collective that restores nothing."""
        for user in collective.users:
            held, sent = meta.tensor(user), meta.tensor(collective.args[0])
            if ops.is_op(user, ops.select_rows) and held is not None and sent is not None:
                source = next((n for n in _upstream(collective.args[0]) if body_of(n)), None)
                yield RestoreLine(
                    str(source.target) if source is not None else "", self.size(held.shape[0]),
                    self.size(sent.shape[0]), self.sent(collective),
                )  # fmt: skip

    def boundary(self) -> Boundary | None:
        sharded = [node for node in self.gm.graph.nodes if (body := body_of(node)) and body.sharded]
        if len(sharded) < 2:
            return None
        target, drafter = sharded[:2]
        rows = row_operands(drafter)
        between = [node for node in _upstream(rows[2], stop=target) if node.target is not operator.getitem]
        return Boundary(
            tuple(node.name for node in between),
            sum(self.sent(node) for node in between if is_collective(node)),
            drafter.args[-2] is target.args[-2],
            ops.is_op(rows[0], ops.shard_into) and rows[0].args[2] is target.args[0],
        )


def _upstream(node: Any, stop: fx.Node | None = None) -> Iterator[fx.Node]:
    """The node and what it is made of, nearest first; bodies, inputs and ``stop`` end the way."""
    waiting, seen = [node], set()
    while waiting:
        found = waiting.pop(0)
        if found in seen or found is stop or found.op == "placeholder":
            continue
        seen.add(found)
        yield found
        if body_of(found) is None:
            waiting += found.all_input_nodes
