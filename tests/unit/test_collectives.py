# SPDX-License-Identifier: Apache-2.0
from contextlib import AbstractContextManager

import pytest
import torch

from pcp_passes.collectives import (
    Collective,
    all_gather_rows,
    all_gather_rows_op,
    bind_axis,
    bound_axis,
    is_collective,
    is_gather,
    record_collectives,
    unbind_axis,
)
from pcp_passes.collectives_ragged import gather_ragged_op, in_rank_order, reduce_ragged_op, reduce_rows_op
from pcp_passes.errors import ConfigError, RankMismatch
from pcp_passes.mesh.peer_rows import PeerRows
from pcp_passes.paged import AttentionInputs, PagedCaches, running

pytestmark = pytest.mark.unit
AXIS = "test_axis"


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x + 1])


def test_an_unbound_axis_says_how_to_bind_it() -> None:
    with pytest.raises(ConfigError, match=r"no group is bound to it.*bind_axis\('test_axis', group\)"):
        all_gather_rows(torch.ones(2, 3), 2, AXIS)


def test_a_callable_serves_as_a_group() -> None:
    x = torch.arange(6.0).view(2, 3)
    with bound_axis(AXIS, twice):
        assert torch.equal(all_gather_rows(x, 2, AXIS), twice(x))


def test_bindings_nest_and_end() -> None:
    bind_axis(AXIS, twice)
    with bound_axis(AXIS, lambda x: torch.cat([x, x])):
        assert torch.equal(all_gather_rows(torch.zeros(1), 2, AXIS), torch.zeros(2))
    assert torch.equal(all_gather_rows(torch.zeros(1), 2, AXIS), torch.tensor([0.0, 1.0]))
    unbind_axis(AXIS)
    unbind_axis(AXIS)
    with pytest.raises(ConfigError):
        all_gather_rows(torch.zeros(1), 2, AXIS)


@pytest.mark.parametrize("gather", [lambda x: x, lambda x: torch.cat([x, x]).double(), lambda x: torch.cat([x] * 3)])
def test_a_gather_over_the_wrong_ranks_is_refused(gather) -> None:
    with bound_axis(AXIS, gather), pytest.raises(RankMismatch, match=r"required torch.float32\[4, 3\]"):
        all_gather_rows(torch.ones(2, 3), 2, AXIS)


def test_the_result_never_aliases_the_operand() -> None:
    x = torch.ones(2, 3)
    with bound_axis(AXIS, lambda rows: rows):
        result = all_gather_rows(x, 1, AXIS)
    result.zero_()
    assert torch.equal(x, torch.ones(2, 3))


def test_a_strided_operand_is_our_bug() -> None:
    with bound_axis(AXIS, twice), pytest.raises(AssertionError, match="needs a contiguous operand"):
        all_gather_rows(torch.ones(3, 2).t(), 2, AXIS)


def test_collectives_are_recorded_inside_a_block_only() -> None:
    with bound_axis(AXIS, twice):
        with record_collectives() as log, record_collectives() as inner:
            all_gather_rows(torch.ones(2, 3), 2, AXIS)
            all_gather_rows(torch.ones(5, dtype=torch.bfloat16), 2, AXIS)
        with record_collectives() as outer:
            with record_collectives() as short:
                pass
            all_gather_rows(torch.ones(2, 3), 2, AXIS)
        assert (outer.calls, short.calls) == (1, 0)
        all_gather_rows(torch.ones(2, 3), 2, AXIS)
    assert log.entries == inner.entries == [
        Collective("pcp::all_gather_rows", AXIS, (2, 3), torch.float32),
        Collective("pcp::all_gather_rows", AXIS, (5,), torch.bfloat16),
    ]  # fmt: skip
    assert (log.calls, log.bytes) == (2, 24 + 10)
    assert str(log.entries[0]) == "pcp::all_gather_rows(torch.float32[2, 3], axis 'test_axis')"


@pytest.mark.parametrize("x", [torch.ones(2, 3), torch.ones(4), torch.ones(1, 2, 5, dtype=torch.bfloat16)])
@pytest.mark.parametrize("pcp", [1, 2, 3])
def test_operator_checks(x: torch.Tensor, pcp: int) -> None:
    with bound_axis(AXIS, lambda rows: torch.cat([rows] * pcp)):
        torch.library.opcheck(all_gather_rows_op, (x, pcp, AXIS))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_one_compilation_serves_every_row_count(backend: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pcp.all_gather_rows((x * 2).relu(), 2, AXIS).sin()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    counted = torch.compile(function, backend=counter, fullgraph=True)
    with bound_axis(AXIS, twice), torch.no_grad():
        for rows in (7, 2, 33):
            x = torch.randn(rows, 3)
            torch._dynamo.mark_dynamic(x, 0)
            torch.testing.assert_close(compiled(x), twice((x * 2).relu()).sin(), rtol=0, atol=1e-6)
            counted(x)
    assert counter.frame_count == 1


# Of experts: rows of several counts, and sums. Over real groups in tests/multiproc/test_expert_ranks.py.


def told(tokens: tuple[int, ...], replica: int, per_request: int = 0) -> AbstractContextManager[None]:
    caches = PagedCaches(1, 1)
    caches.peers = PeerRows(tokens, (1,) * len(tokens), replica)
    zeros, ends = torch.zeros(1, dtype=torch.int64), torch.tensor([0, 1])
    tables = torch.zeros(1, 1, dtype=torch.int32)
    return running(caches, AttentionInputs(zeros, "replicated", tables, ends, ends[1:], zeros, per_request))


def test_a_ragged_gather_cuts_what_was_padded() -> None:
    x = torch.arange(1.0, 5.0).view(2, 2)

    def gather(rows: torch.Tensor) -> torch.Tensor:
        assert rows.shape == (3, 2) and not rows[2:].any(), "padded to the longest"
        return torch.cat([rows, rows + 10])

    with bound_axis(AXIS, gather), told((2, 3), 0), record_collectives() as log:
        found = gather_ragged_op(x, 2, AXIS)
    assert torch.equal(found, torch.cat([x, x + 10, torch.full((1, 2), 10.0)]))
    assert str(log.entries[0]) == "pcp::gather_ragged(torch.float32[5, 2], axis 'test_axis')"
    assert log.bytes == 2 * 2 * 4
    with bound_axis(AXIS, gather), told((2, 3), 1), pytest.raises(RankMismatch, match=r"brings 2 rows and told .* 3"):
        gather_ragged_op(x, 2, AXIS)
    assert log.calls == 1, "nothing is recorded that is not sent"


def test_a_sum_is_taken_in_rank_order() -> None:
    """1e16 + 1 - 1e16 depends on the order; three ranks bring one summand each."""
    parts = [torch.tensor([[value]], dtype=torch.float64) for value in (1e16, -1e16, 1.0)]
    with bound_axis(AXIS, lambda rows: torch.cat(parts)):
        assert reduce_rows_op(parts[0], False, 3, AXIS).item() == 1.0
    with bound_axis(AXIS, lambda rows: torch.cat([parts[0], parts[2], parts[1]])):
        assert reduce_rows_op(parts[0], False, 3, AXIS).item() == 0.0
    assert in_rank_order([p.bfloat16() for p in (torch.tensor([256.0]), *[torch.tensor([1.0])] * 2)]).item() == 258.0
    assert in_rank_order(parts[:1]).data_ptr() != parts[0].data_ptr()


def test_sums_refuse_what_they_cannot_deal() -> None:
    x = torch.ones(3, 2)
    with bound_axis(AXIS, twice):
        with pytest.raises(RankMismatch, match="3 rows cannot be dealt to 2 ranks"):
            reduce_rows_op(x, True, 2, AXIS)
        with pytest.raises(ConfigError, match="a sum by owner needs a process group"):
            reduce_rows_op(x[:2], True, 2, AXIS)
        with told((3, 2), 0), pytest.raises(RankMismatch, match="found 3 rows; the replicas brought 5"):
            reduce_ragged_op(x, x, 2, AXIS)


def test_every_collective_is_known() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    nodes = {
        op: graph.call_function(op, (x,))
        for op in (all_gather_rows_op, gather_ragged_op, reduce_rows_op, reduce_ragged_op, torch.relu)
    }
    assert [is_collective(node) for node in nodes.values()] == [True] * 4 + [False]
    assert [is_gather(node) for node in nodes.values()] == [True, True] + [False] * 3


def test_operator_checks_of_sums() -> None:
    with bound_axis(AXIS, twice):
        torch.library.opcheck(reduce_rows_op, (torch.ones(4, 3), False, 2, AXIS))
