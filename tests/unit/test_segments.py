# SPDX-License-Identifier: Apache-2.0
"""Graphs cut at the points where ranks meet, run in lockstep."""

from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn

from pcp_passes.collectives import CollectiveLog
from pcp_passes.errors import ConfigError, PcpError, RankMismatch
from pcp_passes.ir.token_markers import restore_op
from pcp_passes.segments import segments_of
from pcp_passes.simulate import simulate, simulate_segments
from pcp_passes.step.calls import Nested
from tests import steps

pytestmark = pytest.mark.unit
GATHER = torch.ops.pcp.all_gather_rows.default


def gathering(times: int = 2, pcp: int = 2) -> fx.GraphModule:
    """``x -> gather(x + 1)``, repeated on the rank's rows; returns both."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(times):
        x = graph.call_function(torch.add, (x, 1))
        rows = graph.call_function(GATHER, (x, pcp, "pcp"))
    graph.output((rows, x))
    return fx.GraphModule({}, graph)


class Calling(nn.Module):
    """A module with stops of its own, entered ``entered`` times."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.entered = gathering(1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]

    def nested(self, operands):
        def enter():
            self.entered += 1
            return nullcontext()

        return Nested(self.inner, tuple(operands), enter, lambda found: found[0])


def nesting() -> tuple[fx.GraphModule, Calling]:
    """``x -> module(x + 1) * 2``."""
    root, called = nn.Module(), Calling()
    root.add_module("called", called)
    graph = fx.Graph()
    x = graph.call_function(torch.add, (graph.placeholder("x"), 1))
    graph.output(graph.call_function(torch.mul, (graph.call_module("called", (x,)), 2)))
    return fx.GraphModule(root, graph), called


def test_segments_lie_between_stops_and_drop_what_is_read_no_more() -> None:
    parts = segments_of(gathering()).parts
    assert [part.stop is not None for part in parts] == [True, True, False]
    assert [[node.name for node in part.reads] for part in parts] == [["x"], ["add"], []]
    assert [node.name for node in parts[0].dead] == ["x", "all_gather_rows_default"]
    gm = gathering()
    assert segments_of(gm) is segments_of(gm)


@pytest.mark.parametrize("make", [gathering, lambda: nesting()[0]])
def test_segments_give_what_node_by_node_gives(make) -> None:
    inputs = [[torch.full((2, 3), float(rank))] for rank in range(2)]
    logs: list[CollectiveLog] = []
    others: list[CollectiveLog] = []
    found = simulate_segments(make(), inputs, logs=logs)
    wanted = simulate(make(), inputs, logs=others)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert [log.entries for log in logs] == [log.entries for log in others] and logs[0].calls > 0


def test_ranks_meet_inside_a_called_module_and_its_context_is_entered_around_each_segment() -> None:
    gm, called = nesting()
    outputs = simulate_segments(gm, [[torch.zeros(1, 2)], [torch.ones(1, 2)]])
    assert outputs[0].tolist() == outputs[1].tolist() == [[4.0, 4.0], [6.0, 6.0]]
    assert called.entered == 2, "once per rank: the inner graph has one segment before its stop"


def test_ranks_that_diverge_inside_a_called_module_are_found() -> None:
    gm, _ = nesting()
    with pytest.raises(RankMismatch, match=r"rank 1 diverges(.|\n)*all_gather_rows"):
        simulate_segments(gm, [[torch.zeros(1, 2)], [torch.ones(2, 2)]])


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="found 2 inputs; required x"):
        simulate_segments(gathering(), [[torch.zeros(1)] * 2] * 2)
    with pytest.raises(ConfigError, match="gathers over 3 ranks"):
        simulate_segments(gathering(pcp=3), [[torch.zeros(1, 1)]] * 2)
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(restore_op, (x, x, 0, 1, 1, 2, "pcp")))
    with pytest.raises(PcpError, match="run the pass that lowers them"):
        segments_of(fx.GraphModule({}, graph))


def test_a_step_runs_the_same_node_by_node() -> None:
    """The plain interpreter understands called bodies too: slower, with errors that name nodes."""
    host = steps.Host(steps.program(2), steps.requests())
    inputs, layout = host.batch([(0, 9), (1, 6)])
    values = []
    for state, plan in zip(host.states, host.plans(inputs, layout), strict=True):
        kept = {**vars(inputs), **vars(plan), "caches": state.caches, "table_buffer": state.table_buffer(4, 12)}
        values.append([kept[str(n.target)] for n in host.program.sharded.graph.find_nodes(op="placeholder")])
    found = simulate(host.program.sharded, values)
    again = steps.Host(host.program, steps.requests()).step([(0, 9), (1, 6)])
    assert torch.equal(found[0][0], again.sampled) and torch.equal(found[1][4], again.drafts)


def test_a_called_module_may_run_as_a_whole() -> None:
    """Its ``finish`` is then all of the call, which meets nobody."""
    gm, called = nesting()
    called.nested = lambda operands: Nested(None, (), nullcontext, lambda found: (found, operands[0] * 10)[1])
    for run in (simulate, simulate_segments):
        found = run(gm, [(torch.ones(1),), (torch.full((1,), 3.0),)])
        assert [float(one) for one in found] == [40.0, 80.0]
