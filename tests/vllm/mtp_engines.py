# SPDX-License-Identifier: Apache-2.0
"""The engines that draft with the checkpoint's own module, and what their probes saw of each case."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from pcp_passes.frontends.vllm.session import Group, Request
from tests.models import prompt
from tests.vllm import draft_faults
from tests.vllm.cases import ragged
from tests.vllm.engines import FULL, Engine, result_of

CASES = ("ragged", "shared_prefix", "waves", "sampled", "aborted")
#: Prompts of their own, because a prompt that comes again is found in the prefix cache.
NOISE_SEEDS = (11, 12)


def even() -> tuple[Request, ...]:
    """As many tokens as gathered rows, so that nothing about the shapes tells one order from the other."""
    return (Request(prompt(64, seed=7), 6), Request(prompt(32, seed=8), 6))


def stock(model: str, drafts: int) -> Engine:
    """vLLM without us on one rank, not compiled."""
    mla = "mla" in model
    return Engine(
        model,
        pcp=1,
        mode=0,
        options=None,
        budget=512 if mla else 64,
        prefix_caching=not mla,
        cases=CASES,
        drafts=drafts,
        extra=(Group(even()),) if mla else tuple(Group(ragged(seed).requests) for seed in NOISE_SEEDS),
    )


def _fault(*names: str, requests: tuple[Request, ...] | None = None) -> Group:
    return Group(requests or ragged().requests, tuple(draft_faults.qualified(name) for name in ("undo", *names)))


#: Name and group of each fault in the engine that carries it; ``even`` is what ``stock`` runs under ``extra 0``.
MLA_FAULTS = {
    "even": Group(even()),
    "edges_not_shifted": _fault("edges_not_shifted"),
    "tables_not_gathered_again": _fault("tables_not_gathered_again"),
    "drafts_not_restored": _fault("drafts_not_restored"),
    "slots_by_shape": _fault("slots_by_shape", requests=even()),
    "none": _fault(),
}
NOISE = {
    "noise": _fault("noise", requests=ragged(NOISE_SEEDS[0]).requests),
    "broadcast_dropped": _fault("noise", "broadcast_dropped", requests=ragged(NOISE_SEEDS[1]).requests),
}

_MLA = replace(stock("tiny_mla_mtp", 2), pcp=2)
#: vLLM's own batch manager and gathers.
NATIVE = _MLA
MLA = replace(
    _MLA,
    mode=2,
    backend="eager",
    options={"decode": "owner", "poison": True},
    extra=tuple(MLA_FAULTS.values()),
)
GLM_1 = replace(
    stock("tiny_glm_mtp", 1),
    pcp=2,
    mode=2,
    backend="eager",
    options={"verify_tokens": "broadcast", "decode": "owner"},
    extra=tuple(NOISE.values()),
)
#: Ends in the middle of a proposal.
GLM_3 = replace(
    stock("tiny_glm_mtp", 3),
    pcp=2,
    mode=2,
    options={"poison": True, "silence_s": 6},
    doomed=draft_faults.qualified("freeze_in_a_draft_step"),
)
COVER = (MLA, GLM_1, GLM_3)


def full_matrix() -> tuple[Engine, ...]:
    """Both models with 1 to 3 drafts and both compilers; the other options; mode 3."""
    engines = [
        replace(
            stock(model, drafts), pcp=2, mode=2, backend=backend, options={"poison": True, "decode": decode}, extra=()
        )
        for model in ("tiny_mla_mtp", "tiny_glm_mtp")
        for drafts, decode in ((1, "owner"), (2, "replicate"), (3, "owner"))
        for backend in ("eager", "inductor")
    ]
    replicated = {"drafter": "replicate", "verify_tokens": "broadcast"}
    engines += [replace(GLM_3, options=options, doomed="", mode=mode) for options, mode in ((replicated, 2), ({}, 3))]
    return tuple(engines)


ENGINES = (*COVER, *full_matrix()) if FULL else COVER


def reference(engine: Engine) -> Engine:
    """The engine on one rank that answers for ``engine``."""
    return stock(engine.model, engine.drafts)


def start_references() -> None:
    """An engine on one rank keeps one core busy; the machine has two."""
    wanted = {str(engine): engine for engine in map(reference, ENGINES)}.values()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(result_of, wanted))


def probed(engine: Engine, rank: int = 0) -> dict[str, Any]:
    """What the probe of one worker returned."""
    index = list(engine.groups()).index("probed")
    found: dict[str, Any] = result_of(engine).rpc[index][0][rank]
    return found


def steps_of(engine: Engine, name: str, what: str, rank: int = 0) -> list[dict[int, Any]]:
    """``what`` (``accepted`` or ``drafts``) in every step of a group, by request. vLLM appends letters of its own to
    the names of requests."""
    index = list(engine.groups()).index(name)
    steps = [
        {int(key.split("-")[1]): value for key, value in step.items() if key.split("-")[0] == str(index)}
        for step in probed(engine, rank)[what]
    ]
    return [step for step in steps if step]
