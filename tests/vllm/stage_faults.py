# SPDX-License-Identifier: Apache-2.0
"""Faults put into the stages of a running engine, one at a time, and what each stage made of the rounds; :func:`undo`
removes whatever is in place. Functions for ``collective_rpc``."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from typing import Any

import numpy as np
import torch

_BEFORE = "_pcp_passes_before_the_fault"


def undo(worker: Any) -> None:
    """Back to the real code."""
    runner = worker.model_runner
    for name in ("_send", "get_prev_sampled_outputs", "on_req_idx_freed"):
        vars(runner.pp_handler).pop(name, None)
    # `execute_model` is the probe's, where there is one; faults are put in front of it and taken off.
    if (before := vars(runner).pop(_BEFORE, None)) is not None:
        runner.execute_model = before


def drafts_not_shipped(worker: Any) -> None:
    """The last stage ships zeros for its drafts."""
    handler = worker.model_runner.pp_handler
    send = type(handler)._send
    handler._send = lambda batch, drafts: send(handler, batch, torch.zeros_like(drafts))


def rejections_forgotten(worker: Any) -> None:
    """The other stages keep the rows of rejected drafts."""
    handler = worker.model_runner.pp_handler
    derive = type(handler).get_prev_sampled_outputs

    def forgetful(*args: Any) -> Any:
        found = derive(handler, *args)
        if found is not None:
            found["num_rejected"].zero_()
        return found

    handler.get_prev_sampled_outputs = forgetful


def generations_ignored(worker: Any) -> None:
    """A row that was given to another request takes the round of the one before."""
    worker.model_runner.pp_handler.on_req_idx_freed = lambda row: None


def rows_rolled(worker: Any) -> None:
    """The last stage takes each row that it received for the next one."""
    runner = worker.model_runner
    if not runner.is_last_pp_rank:
        return
    execute = getattr(runner, _BEFORE, None) or runner.execute_model
    setattr(runner, _BEFORE, execute)

    def rolling(scheduler_output: Any, received: Any = None, **kwargs: Any) -> Any:
        if received is not None:
            received = type(received)({name: rows.roll(1, 0) for name, rows in received.tensors.items()}, [], [])
        return execute(scheduler_output, received, **kwargs)

    runner.execute_model = rolling


_ATTRIBUTE = "_pcp_passes_rounds"


def record(worker: Any) -> None:
    """Begin to note, by number, each round: the requests' rows, how many tokens they got, how many were rejected."""
    handler = worker.model_runner.pp_handler
    rounds: dict[int, list[list[int]]] = {}
    setattr(handler, _ATTRIBUTE, rounds)
    if handler.is_last_rank:
        ship = type(handler).broadcast

        def broadcast(tokens: Any, sampled: torch.Tensor, rejected: torch.Tensor, batch: Any) -> None:
            number = handler.rounds
            ship(handler, tokens, sampled, rejected, batch)
            if handler.sampled is not None:
                rounds[number] = [batch.idx_mapping_np.tolist(), sampled.tolist(), rejected.tolist()]

        handler.broadcast = broadcast
        return
    receive = handler.receiver.receive

    def received() -> Any:
        found = receive()
        derived = found.derived
        rounds[found.stash.step] = [
            list(found.stash.rows),
            derived.num_sampled.tolist(),
            derived.num_rejected.tolist(),
        ]
        return found

    handler.receiver.receive = received


def recorded(worker: Any) -> dict[str, Any]:
    """What :func:`record` noted, ``{round: [rows, tokens, rejected]}``."""
    return dict(getattr(worker.model_runner.pp_handler, _ATTRIBUTE))


def freed(worker: Any) -> int:
    """How often a row was freed so far."""
    return int(np.sum(worker.model_runner.pp_handler.req_idx_gen_np))


def freeze_the_first_stage(worker: Any) -> None:
    """The first stage stops when it is to run its third step from now."""
    runner = worker.model_runner
    if not runner.is_first_pp_rank:
        return
    prepare = type(runner).prepare_inputs
    calls: list[None] = []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
        return prepare(runner, *args, **kwargs)

    runner.prepare_inputs = stopping


def fail_in_the_first_stage(worker: Any) -> None:
    """The first stage raises when it is to run its third step from now."""
    runner = worker.model_runner
    if not runner.is_first_pp_rank:
        return
    prepare = type(runner).prepare_inputs
    calls: list[None] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 3:
            raise RuntimeError("planted in the first stage")
        return prepare(runner, *args, **kwargs)

    runner.prepare_inputs = failing


def end_at_the_first_error(worker: Any) -> None:
    """For an engine without us, which would wait for ever: a worker that fails to run a step says where, and ends."""
    runner = worker.model_runner
    execute = type(runner).execute_model

    def ending(*args: Any, **kwargs: Any) -> Any:
        try:
            return execute(runner, *args, **kwargs)
        except BaseException as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            stage = "the first stage" if runner.is_first_pp_rank else "another stage"
            logging.getLogger("vllm").error("%s is lost: %s in %s: %s", stage, type(error).__name__, at.name, at.line)
            os._exit(1)

    runner.execute_model = ending


def qualified(name: str) -> str:
    """The name by which a session calls one of these functions."""
    return f"{__name__}:{name}"
