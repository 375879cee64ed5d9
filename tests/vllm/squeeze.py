# SPDX-License-Identifier: Apache-2.0
"""Few free cache blocks for a while, so that requests are preempted. Functions for ``Group.front``: the scheduler is in
the child's own process."""

from __future__ import annotations

from typing import Any

#: Blocks that stay free. The prompts of ``ragged`` fit, and not all that is generated after them; ``waves`` has more.
FREE = 19
_preempted: list[None] = []
_undo: list[Any] = []


def tighten() -> None:
    """From the next step on, all blocks but ``FREE`` are taken, and preemptions are counted."""
    from vllm.v1.core.sched.scheduler import Scheduler

    schedule, preempt = Scheduler.schedule, Scheduler._preempt_request

    def short(self: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.kv_cache_manager.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - FREE)
        _undo.append(lambda: pool.free_blocks(taken))
        Scheduler.schedule = schedule
        return schedule(self, *args, **kwargs)

    def counted(*args: Any, **kwargs: Any) -> Any:
        _preempted.append(None)
        return preempt(*args, **kwargs)

    Scheduler.schedule, Scheduler._preempt_request = short, counted
    _undo.append(lambda: setattr(Scheduler, "_preempt_request", preempt))


def loosen() -> int:
    """Give the blocks back; how often a request was preempted."""
    while _undo:
        _undo.pop()()
    return len(_preempted)
