# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from pcp_passes.collectives import (
    Collective,
    all_gather_rows,
    all_gather_rows_op,
    bind_axis,
    bound_axis,
    record_collectives,
    unbind_axis,
)  # fmt: skip
from pcp_passes.errors import ConfigError, RankMismatch

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
