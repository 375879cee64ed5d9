# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from torch._subclasses import FakeTensorMode

from pcp_passes.errors import PcpError
from pcp_passes.ir.markers import is_marker, marker_rows, reshard_many_op, reshard_op

pytestmark = pytest.mark.unit
MARK = ("shard", "rank_major", 3, "pcp")


def test_running_a_marker_says_what_to_do() -> None:
    for call in (lambda: reshard_op(torch.ones(2, 4), *MARK), lambda: reshard_many_op([torch.ones(2, 4)], *MARK)):
        with pytest.raises(PcpError, match=r"is a marker and cannot run.*lower-reshards.*pcp_passes\.simulate"):
            call()


def test_fakes_multiply_the_rows_and_are_contiguous() -> None:
    with FakeTensorMode():
        x = torch.empty(8, 2).t()
        one = reshard_op(x, *MARK)
        many = reshard_many_op([x, torch.empty(2, 3, dtype=torch.float16)], *MARK)
    assert (tuple(one.shape), one.dtype, one.is_contiguous()) == ((6, 8), torch.float32, True)
    assert [(tuple(t.shape), t.dtype) for t in many] == [((6, 8), torch.float32), ((6, 3), torch.float16)]


@pytest.mark.parametrize("src, dst", [("rank_major", "shard"), ("shard", "shard"), ("replicate", "rank_major")])
def test_other_reshards_are_refused_with_the_one_that_exists(src: str, dst: str) -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match="the only one is 'shard' to 'rank_major'"):
        reshard_op(torch.empty(2, 4), src, dst, 3, "pcp")


def test_rows_of_a_marker() -> None:
    graph = torch.fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    one = graph.call_function(reshard_op, (a, *MARK))
    many = graph.call_function(reshard_many_op, ([a, b], *MARK))
    assert marker_rows(one) == (a,)
    assert marker_rows(many) == (a, b)
    assert is_marker(one)
    assert is_marker(many)
    assert not is_marker(a)
