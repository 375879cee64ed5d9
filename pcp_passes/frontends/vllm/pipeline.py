# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages in vLLM's Model Runner V2: speculative decoding across them, and failures that nobody would hear.

vLLM can send a step's sampled tokens and drafts from the last stage to the others. What it gets wrong, without
asynchronous scheduling, is *when the scheduler hears of the drafts*: several steps are in flight, and the engine asks
the workers for drafts right after it scheduled a step, before that step's output was looked at. A request whose prompt
has just run then counts as having K drafts and no sampled token, is scheduled with K rows for its K + 1 logits, and
``prepare_inputs`` of the first stage fails its assertion (the other stages wait for it, and so does the engine). Here
the drafts ride on the output of the step that made them, and the scheduler learns of both together, which also saves a
blocking call per step. With asynchronous scheduling the scheduler counts placeholders, and nothing is changed.

The engine waits only for the worker that samples, so an exception in another one is a line in a log and then silence:
here such a worker ends, which vLLM notices.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pcp_passes.distributed.watch.heartbeat import EXIT_CODE
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import metrics
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.config import options_of

logger = logging.getLogger(__name__)

#: Where a step's output carries its drafts.
DRAFTS = "pcp_passes_drafts"
#: Seconds that a failed worker leaves the engine to end by itself.
GRACE_S = 5.0
_HAVE_NAN = (torch.float32, torch.bfloat16, torch.float16)


def drafts_ride(config: Any) -> bool:
    """Whether outputs of an engine of this ``VllmConfig`` carry the drafts: stages, drafts, and a scheduler that waits
    for each output."""
    return (
        config.parallel_config.pipeline_parallel_size > 1
        and config.speculative_config is not None
        and not config.scheduler_config.async_scheduling
        and options_of(config.additional_config) is not None
    )


# -- in the engine -----------------------------------------------------------------------------------------


def around_post_step(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``EngineCore.post_step``, which would fetch the drafts too early."""
    if engine.batch_queue is not None and drafts_ride(engine.vllm_config):
        return None
    return original(engine, *args, **kwargs)


def around_update_from_output(
    original: Callable[..., Any], scheduler: Any, scheduler_output: Any, output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``Scheduler.update_from_output``: the drafts of the requests that this output gave a token and that may be
    scheduled again now.

    Of the others, some are in the middle of their prefill, perhaps with its last part in flight; and some were
    preempted meanwhile, so their next step is a prefill.
    """
    result = original(scheduler, scheduler_output, output, *args, **kwargs)
    drafts = getattr(output, DRAFTS, None)
    if drafts is not None:
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        kept = [i for i, n in enumerate(drafts.req_ids) if sampled.get(n) and _is_next(scheduler.requests.get(n))]
        drafts.req_ids = [drafts.req_ids[i] for i in kept]
        drafts.draft_token_ids = [drafts.draft_token_ids[i] for i in kept]
        scheduler.update_draft_token_ids(drafts)
    return result


def _is_next(request: Any) -> bool:
    """Whether all tokens of a running request but the last have been computed."""
    if request is None or request.status.name != "RUNNING":
        return False
    return bool(request.num_computed_tokens == request.num_tokens - 1)


# -- in a worker -------------------------------------------------------------------------------------------


def around_sample_tokens(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``GPUModelRunner.sample_tokens``: put the drafts on the output, and count (:mod:`.metrics`)."""
    output = _heard(metrics.around_sample_tokens, original, runner, *args, **kwargs)
    if output is not None and runner.is_last_pp_rank and drafts_ride(runner.vllm_config):
        setattr(output.model_runner_output, DRAFTS, runner.take_draft_token_ids())
    return output


def around_execute_model(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``Worker.execute_model``: what the worker receives and sends around its runner's step is in it, and dummy
    runs, whose failures are heard, are not."""
    return _heard(original, worker, *args, **kwargs)


def _heard(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``call(*args)``; when it raises in a worker whose answers nobody waits for, this process ends soon."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        runtime = runtimes.current()
        if runtime is not None and not runtime.answers:
            logger.critical(
                "pcp_passes: %s is lost: it failed with %s: %s. vLLM waits only for the rank that samples, so this "
                "process ends in %.0f s. Next: look at the traceback of that error.",
                runtime.name,
                type(error).__name__,
                error,
                GRACE_S,
            )
            timer = threading.Timer(GRACE_S, os._exit, (EXIT_CODE,))
            timer.daemon = True
            timer.start()
        raise


@contextmanager
def draft_embedding_watched(vllm_config: Any) -> Iterator[None]:
    """Around the first load: the drafter's class looks whether the checkpoint gave it an embedding table. Its stage
    holds none of the target's, so one that was not loaded would stay as the allocator left it. Later loads may be of a
    part of the weights."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "mtp" or vllm_config.parallel_config.pipeline_parallel_size == 1:
        yield
        return
    from vllm.model_executor.model_loader.utils import get_model_cls

    from pcp_passes.frontends.vllm.plugin import wrap

    drafter = get_model_cls(speculative.draft_model_config)
    original = drafter.load_weights
    wrap(drafter, "load_weights", around_draft_load)
    try:
        yield
    finally:
        drafter.load_weights = original


def around_draft_load(original: Callable[..., Any], drafter: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps ``load_weights`` of a drafter. Some say which parameters they loaded; of the others a table is looked at.

    Raises:
        ConfigError: naming the tensors that were looked for.
    """
    runtime = runtimes.current()
    if runtime is None or runtime.stages == 1:
        return original(drafter, weights, *args, **kwargs)
    tables = {name: table for name, table in drafter.named_parameters() if name.endswith("embed_tokens.weight")}
    for table in tables.values():
        if table.dtype in _HAVE_NAN:
            table.data.fill_(float("nan"))
    loaded = original(drafter, weights, *args, **kwargs)
    if loaded is None:
        missing = [name for name, table in tables.items() if table.dtype in _HAVE_NAN and bool(table.isnan().all())]
    else:
        missing = [name for name in tables if name not in loaded]
    if missing:
        layer = drafter.config.num_hidden_layers
        raise ConfigError(
            f"the draft module ({type(drafter).__name__}) is on the last of {runtime.stages} pipeline stages, where "
            f"the target has no embedding, and the checkpoint has neither 'model.layers.{layer}.embed_tokens.weight' "
            f"nor {missing[0]!r} for it; use a checkpoint with one of them, or set pipeline_parallel_size to 1."
        )
    return loaded
