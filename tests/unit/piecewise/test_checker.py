# SPDX-License-Identifier: Apache-2.0
"""The replay checker on plain functions: what it refuses, what it poisons, what it counts."""

from __future__ import annotations

import logging

import pytest
import torch

from pcp_passes.errors import ConfigError, GraphError
from pcp_passes.piecewise.replay_checker import ReplayChecker, poison
from pcp_passes.piecewise.replayer import GraphKey, GraphMode

CALL = GraphKey("target", "sharded", GraphMode.PIECEWISE, 8)
FIRST, SECOND = (GraphKey("target", "sharded", GraphMode.PIECEWISE, 8, piece=i) for i in range(2))


def double(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (2 * x,)


def owned(*shape: int) -> tuple[ReplayChecker, torch.Tensor]:
    """A checker, and a buffer that it knows."""
    checker, buffer = ReplayChecker(), torch.zeros(shape)
    checker.own([buffer])
    return checker, buffer


def test_a_replay_writes_the_same_outputs() -> None:
    checker, x = owned(8)
    (first,) = checker.run(FIRST, double, (x,))
    x.fill_(3)
    (second,) = checker.run(FIRST, double, (x,))
    assert second is first and first.tolist() == [6.0] * 8
    assert (checker.captures[FIRST], checker.hits[FIRST], checker.captured_bytes) == (1, 1, 32)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: x.clone(), r"x is torch.float32\[8, 2\] .* at 0x\w+, required torch.float32\[8, 2\] .* at 0x"),
        (lambda x: x[:4], r"x is torch.float32\[4, 2\]"),
        (lambda x: x.as_strided((8, 2), (1, 8)), r"with strides \(1, 8\) .* required .* with strides \(2, 1\)"),
        (lambda x: x.view(torch.int32), r"x is torch.int32"),
    ],
)
def test_another_address_shape_stride_or_dtype_is_refused(other, message: str) -> None:
    checker, x = owned(8, 2)
    checker.run(FIRST, double, (x,), ("x",))
    with pytest.raises(GraphError, match=rf"target.sharded piecewise 8 piece 0 cannot be replayed.*{message}"):
        checker.run(FIRST, double, (other(x),), ("x",))


def test_every_offender_is_named() -> None:
    checker, x = owned(8)
    checker.run(FIRST, lambda a, b: (a + b,), (x, x), ("a", "b"))
    with pytest.raises(GraphError, match=r"a is .*; b is "):
        checker.run(FIRST, lambda a, b: (a + b,), (x.clone(), x.clone()), ("a", "b"))
    with pytest.raises(GraphError, match="found 1 inputs, required 2"):
        checker.run(FIRST, double, (x,))


def test_a_freed_tensor_is_not_taken_for_the_captured_one() -> None:
    """An allocator gives the same address again; the checker keeps what it captured, so it cannot."""
    checker, _ = owned(1)
    checker.own([temporary := torch.zeros(1000)])
    checker.run(FIRST, double, (temporary,))
    checker._owned.clear()
    del temporary
    for _ in range(20):
        with pytest.raises(GraphError, match="cannot be replayed"):
            checker.run(FIRST, double, (torch.zeros(1000),))


def test_only_addresses_that_someone_keeps_are_captured() -> None:
    checker, x = owned(8)
    (made,) = checker.run(FIRST, double, (x,))
    checker.run(SECOND, double, (made.view(4, 2),))
    with pytest.raises(GraphError, match="would capture input 1 at an address that nothing keeps"):
        checker.run(CALL, lambda a, b: (a + b,), (x, x + 1))


def test_outputs_are_poisoned_when_the_next_call_begins() -> None:
    checker, x = owned(8)
    floats, integers, flags, records = checker.run(
        FIRST, lambda x: (2 * x, x.to(torch.int32), x > 1, x.to(torch.uint8)), (x,)
    )
    kept = floats.clone()
    checker.begin_call(CALL)
    assert floats.isnan().all() and (integers > 1 << 20).all() and flags.all() and (records == 255).all()
    assert x.eq(0).all() and kept.eq(0).all(), "neither inputs nor copies"
    assert checker.run(FIRST, lambda x: (2 * x, x.to(torch.int32), x > 1, x.to(torch.uint8)), (x,))[0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_poison_is_not_a_number_in_every_floating_type(dtype: torch.dtype) -> None:
    value = torch.zeros(3, 4).to(dtype)
    poison(value[:2])
    assert value[:2].float().isnan().all() and not value[2].float().isnan().any()


def test_a_view_of_an_input_is_no_result() -> None:
    checker, x = owned(8)
    with pytest.raises(GraphError, match="gives result 0 as a view of an input"):
        checker.run(FIRST, lambda x: (x.view(2, 4),), (x,))


def test_results_without_rows_share_no_memory() -> None:
    checker, x = owned(8)
    nothing, _ = checker.run(FIRST, lambda x, y: (y.clone(), x + 1), (x, torch.zeros(0)))
    assert not nothing.numel()


def test_another_result_shape_is_refused() -> None:
    checker, x = owned(8)
    sizes = iter((8, 4))

    def shrinking(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x[: next(sizes)] + 1,)

    checker.run(FIRST, shrinking, (x,))
    with pytest.raises(GraphError, match=r"gives result 0 as torch.float32\[4\], captured was torch.float32\[8\]"):
        checker.run(FIRST, shrinking, (x,))


def test_a_replay_runs_what_was_captured() -> None:
    """A function that closes over a value of its own call: a graph goes on reading that of the capture."""
    checker, x = owned(8)
    for step in (1.0, 2.0):
        (found,) = checker.run(FIRST, lambda x, step=step: (x + step,), (x,))
    assert found.tolist() == [1.0] * 8


def test_a_tensor_that_a_function_reaches_without_being_given_it_is_seen() -> None:
    checker, x = owned(8)
    own = torch.ones(8)
    with pytest.raises(
        GraphError, match=r"nothing keeps: torch.float32\[8\] in aten::add.Tensor at test_checker.py:\d+"
    ):
        checker.run(FIRST, lambda x: (x + own,), (x,))
    checker.own([own])
    checker.run(FIRST, lambda x: (x + own + torch.arange(8),), (x,))


def test_a_capture_behind_a_replay_of_the_same_call_is_refused() -> None:
    """The pool would give it the memory of results that the call still reads."""
    checker, x = owned(8)
    checker.begin_call(CALL)
    checker.run(FIRST, double, (x,))  # an error ends the call here
    checker.begin_call(CALL)
    checker.run(FIRST, double, (x,))
    with pytest.raises(GraphError, match="piece 1 would be captured after other pieces of its body call were replayed"):
        checker.run(SECOND, double, (x,))
    checker.begin_call(CALL)
    checker.forget(CALL)
    checker.run(FIRST, double, (x,))
    checker.run(SECOND, double, (x,))
    assert checker.captures == {FIRST: 1, SECOND: 1}


def test_a_key_without_a_graph_is_an_error_after_the_freeze() -> None:
    checker, x = owned(8)
    checker.run(FIRST, double, (x,))
    checker.freeze()
    checker.run(FIRST, double, (x,))
    with pytest.raises(GraphError, match="piece 1 runs after the warm-up but was never captured; captured are target"):
        checker.run(SECOND, double, (x,))


def test_a_call_over_the_bound_is_dropped_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(8)
    checker = ReplayChecker(max_bytes=40)
    checker.own([x])
    small = GraphKey("target", "sharded", GraphMode.PIECEWISE, 1, piece=0)
    with caplog.at_level(logging.WARNING):
        (made,) = checker.run(FIRST, double, (x,))
        checker.run(SECOND, double, (made,))  # 64 bytes: over
        assert CALL not in checker.uncaptured, "dropped when it ends: ranks that differ run its pieces equally often"
        checker.end_call(CALL)
        for key, held in ((small, x[:1]), *((GraphKey("drafter", "sharded", GraphMode.PIECEWISE, n, piece=0), x)
                                            for n in (8, 4))):  # fmt: skip
            checker.begin_call(key.call)
            checker.run(key, double, (held,))
            checker.end_call(key.call)
    assert checker.keys[0] == small and CALL in checker.uncaptured and checker.captured_bytes <= 40
    assert caplog.text.count("it runs uncaptured") == 1, "said once"
    checker.freeze()
    fresh = checker.run(FIRST, double, (torch.ones(8),))
    assert fresh[0].tolist() == [2.0] * 8, "it takes inputs anywhere"
    assert not checker.hits[FIRST]


def test_a_bound_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="bound on captured bytes is -1"):
        ReplayChecker(max_bytes=-1)


def test_keys_say_what_they_are() -> None:
    full = GraphKey("drafter", "replicated", GraphMode.FULL, 8, 4)
    assert (str(full), str(FIRST)) == ("drafter.replicated full 8x4", "target.sharded piecewise 8 piece 0")
    assert FIRST.call == SECOND.call == CALL and full.call is full
