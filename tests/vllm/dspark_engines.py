# SPDX-License-Identifier: Apache-2.0
"""Engines with a DSpark drafter, each started once per test run, and the faults put into one of them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from pcp_passes.frontends.vllm.session import Group, Result, Session, run
from tests.vllm import cases, dspark_models
from tests.vllm.scrape import SNAPSHOT

START, STOP = ("pcp_passes.frontends.vllm.probe:start",), ("pcp_passes.frontends.vllm.probe:stop",)
CASES = ("ragged", "shared_prefix", "waves", "sampled", "aborted")


def undo(worker: Any) -> None:
    """Back to the real code."""
    speculator = worker.model_runner.speculator
    vars(speculator).pop("propose", None)
    vars(speculator.model).pop("combine_hidden_states", None)


def auxiliary_rows_rolled(worker: Any) -> None:
    """Restored auxiliary states are one row off, as if the restore index were another step's."""
    model = worker.model_runner.speculator.model
    real = model.combine_hidden_states
    object.__setattr__(model, "combine_hidden_states", lambda states: real(states.roll(1, dims=0)))


def tables_not_gathered(worker: Any) -> None:
    """The drafter reads whatever block tables an earlier step left."""
    speculator = worker.model_runner.speculator
    real, tables = speculator.propose, speculator.block_tables

    def propose(*args: Any, **kwargs: Any) -> Any:
        tables.gather_block_tables = lambda *_, **__: None
        try:
            return real(*args, **kwargs)
        finally:
            del tables.gather_block_tables

    speculator.propose = propose


FAULTS = ("auxiliary_rows_rolled", "tables_not_gathered")


@functools.cache
def checkpoints() -> tuple[Path, Path]:
    """Target and drafter, written once per test run."""
    return dspark_models.build(Path(tempfile.mkdtemp(prefix="pcp-dspark-")))


def _measured() -> list[Group]:
    """Each case between the start and the stop of a probe; a scrape before and after everything."""
    groups = [Group(rpc=(*START,), front=(SNAPSHOT,))]
    groups += [getattr(cases, name)() for name in CASES]
    return [*groups, Group(rpc=STOP, front=(SNAPSHOT,))]


def _faulty(name: str) -> list[Group]:
    """The ragged case under a fault. The probe is inside it, and is taken off first."""
    return [
        Group(cases.ragged().requests, (f"{__name__}:{name}", *START)),
        Group(rpc=(*STOP, f"{__name__}:undo")),
    ]


@functools.cache
def engine(pcp: int, backend: str, decode: str = "", faults: bool = False) -> Result:
    """Start an engine and run everything. ``decode`` "" is stock vLLM."""
    target, draft = checkpoints()
    arguments: dict[str, Any] = {
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 64,
        "enable_prefix_caching": True,
        "block_size": 32,
        "disable_log_stats": False,
        "speculative_config": {
            "method": "dspark",
            "model": str(draft),
            "num_speculative_tokens": dspark_models.STEPS,
        },
    }
    groups = _measured()
    if faults:
        groups += [group for name in FAULTS for group in _faulty(name)]
    session = Session(
        model=str(target),
        groups=tuple(groups),
        pcp=pcp,
        options={"decode": decode, "poison": True} if decode else None,
        backend=backend,
        engine=arguments,
        env={"VLLM_DISABLE_COMPILE_CACHE": "1"},
    )
    return run(session, timeout_s=420)
