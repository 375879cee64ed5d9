# SPDX-License-Identifier: Apache-2.0
"""Let vLLM's engine end when a worker is lost.

The executor hands steps to its workers through a ring buffer. A frozen worker stops reading; the others may go on for
some steps (a replicated decode step has no collective), until the buffer is full and the engine waits for a free
block, without end: vLLM wakes waiting readers when workers die, but not this writer. Our heartbeat ends the other
workers, vLLM's monitor then shuts the executor down, and with the wait below the engine learns of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pcp_passes.frontends.vllm.config import options_of

#: Seconds between two looks at whether the executor has been shut down.
LOOK_S = 2.0


def around_init_executor(original: Callable[..., Any], executor: Any) -> Any:
    """Wraps ``MultiprocExecutor._init_executor``: where ranks wait for each other, the broadcast queue's writer can be
    interrupted."""
    result = original(executor)
    config = executor.vllm_config
    queue = executor.rpc_broadcast_mq
    parallel = config.parallel_config
    if queue is None or parallel.prefill_context_parallel_size == parallel.pipeline_parallel_size == 1:
        return result
    if options_of(config.additional_config) is not None:
        queue.enqueue = interruptible(queue)
    return result


def interruptible(queue: Any) -> Callable[..., None]:
    """``queue.enqueue`` that gives up when the queue is shut down while it waits for a free block.

    Raises:
        RuntimeError: when a reader was lost and the queue shut down.
    """
    enqueue = queue.enqueue

    def wait_or_give_up(message: Any, timeout: float | None = None) -> None:
        if timeout is not None:
            enqueue(message, timeout)
            return
        while True:
            try:
                enqueue(message, LOOK_S)  # on a timeout nothing has been written
                return
            except TimeoutError:
                if queue.shutting_down:
                    raise RuntimeError("a worker was lost and stopped reading; see its log for the reason") from None

    return wait_or_give_up
