# SPDX-License-Identifier: Apache-2.0
"""Run on a worker whose pieces are captured: switches, counters, and faults that the replay check has to see."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from pcp_passes.errors import PcpError
from pcp_passes.frontends.vllm import graphs, replay_check
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.manager import PassesPCPManager

_entries: Counter[tuple[str, int, str, int]] = Counter()


def qualified(name: str) -> str:
    """The name by which a session calls one of these functions."""
    return f"{__name__}:{name}"


def captured(worker: Any) -> list[dict[str, Any]]:
    """What was captured, and how often each was replayed."""
    return replay_check.captured()


def measured(worker: Any) -> list[dict[str, Any]]:
    """Per piece: what is captured, and what vLLM captured before to measure, and dropped."""
    pieces = replay_check.ReplayCheck.instances
    return [{"body": p.body, "piece": p.index, "kept": len(p.captures), "dropped": p.dropped} for p in pieces]


def count(worker: Any) -> int:
    """How many graphs the worker said that it would capture."""
    runtime = runtimes.current()
    assert runtime is not None
    return graphs.count_graphs(worker.model_runner.vllm_config, runtime)


def graphs_off(worker: Any) -> None:
    """vLLM dispatches to no graph, as before the capture."""
    for manager in _managers(worker):
        manager._graphs_captured = False


def graphs_on(worker: Any) -> None:
    """vLLM dispatches to graphs again."""
    for manager in _managers(worker):
        manager._graphs_captured = True


def _managers(worker: Any) -> Iterator[Any]:
    runner = worker.model_runner
    yield runner.cudagraph_manager
    if runner.speculator is not None:
        yield runner.speculator.prefill_cudagraph_manager


def count_entries(worker: Any) -> None:
    """Begin to count which compiled entry of each piece runs, and the rows that it runs on."""
    from vllm.compilation.piecewise_backend import PiecewiseBackend

    _entries.clear()
    for piece in [o for o in gc.get_objects() if isinstance(o, PiecewiseBackend)]:
        for entry in piece.range_entries.values():
            if not hasattr(entry.runnable, "counted"):
                name = f"{entry.compile_range.start}..{entry.compile_range.end}"
                entry.runnable = _counting(piece, name, entry.runnable)


def _counting(piece: Any, name: str, runnable: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        rows = int(args[piece.sym_shape_indices[0]])
        _entries[piece.vllm_backend.prefix, piece.piecewise_compile_index, name, rows] += 1
        return runnable(*args)

    counted.counted = True  # type: ignore[attr-defined]
    return counted


def entries(worker: Any) -> list[dict[str, Any]]:
    """What ran since :func:`count_entries`."""
    names = ("body", "piece", "entry", "rows")
    found = [dict(zip(names, key, strict=True)) | {"runs": count} for key, count in _entries.items()]
    _entries.clear()
    return found


# -- faults ------------------------------------------------------------------------------------------------


@contextmanager
def _moved(owner: Any, name: str) -> Iterator[None]:
    """The same values in another buffer, as after a reallocation."""
    before = getattr(owner, name)
    setattr(owner, name, before.clone())
    try:
        yield
    finally:
        setattr(owner, name, before)


def _dummy_step(worker: Any) -> str:
    """One step of vLLM's own dummies, which replays the sharded bodies; what it failed with."""
    runner = worker.model_runner
    try:
        runner._dummy_run(8)
    except PcpError as error:
        return str(error)
    finally:
        runner.execute_model_state = None
        runner.kv_connector.set_disabled(False)
    return ""


def nothing_moved(worker: Any) -> str:
    """No fault."""
    return _dummy_step(worker)


def target_ids_moved(worker: Any) -> str:
    """The buffer of the rank-local token ids is another one."""
    with _moved(worker.model_runner.pcp_manager.input_buffers, "input_ids"):
        return _dummy_step(worker)


def draft_states_moved(worker: Any) -> str:
    """The buffer through which hidden states reach the drafter is another one."""
    with _moved(worker.model_runner.speculator, "hidden_states"):
        return _dummy_step(worker)


def by_global_count(worker: Any) -> None:
    """Sizes are chosen by the tokens of the whole batch."""
    PassesPCPManager.get_num_tokens_for_dispatch = (  # type: ignore[method-assign]
        lambda self, num_scheduled_tokens, is_prefilling: int(num_scheduled_tokens.sum())
    )


_BY_RANK = PassesPCPManager.get_num_tokens_for_dispatch


def undo(worker: Any) -> None:
    """Sizes are chosen by rank-local rows again."""
    PassesPCPManager.get_num_tokens_for_dispatch = _BY_RANK  # type: ignore[method-assign]


def replicated_never_captured(worker: Any) -> None:
    """As if only what vLLM's dummies run had been captured."""
    for piece in replay_check.ReplayCheck.instances:
        if piece.body.endswith("_replicated"):
            piece.captures.clear()
