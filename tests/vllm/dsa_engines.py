# SPDX-License-Identifier: Apache-2.0
"""Engines with sparse attention, each started once per test run, and the faults put into one of them."""

from __future__ import annotations

import functools
from typing import Any

from pcp_passes.frontends.vllm.session import Group, Request, Result, Session, run
from tests.models import prompt
from tests.vllm import cases, dsa_models, sabotage

PROBE = "pcp_passes.frontends.vllm.probe"
CASES = ("ragged", "shared_prefix", "waves", "sampled", "aborted")
DRAFTS = 2
BUDGET = 64


def selection_of_another_row(worker: Any) -> None:
    """Each row gets the keys that the row before it selected."""
    select = _select()
    real = select.topk_paged
    _ORIGINAL["topk_paged"] = real
    select.topk_paged = lambda *args, **kwargs: real(*args, **kwargs).roll(1, dims=0)


def own_key_unseen_on_rank_1(worker: Any) -> None:
    """On one rank alone, a row does not see its own key."""
    if _runtime().rank != 1:
        return
    select = _select()
    real = select.topk_paged
    _ORIGINAL["topk_paged"] = real

    def topk_paged(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        given[5] = given[5] - (given[5] > 1).int()
        return real(*given, **kwargs)

    select.topk_paged = topk_paged


def ties_from_the_end(worker: Any) -> None:
    """Of equal scores, rank 1 takes the later key: what an unstable selection may do."""
    if _runtime().rank != 1:
        return
    select = _select()
    real = select.topk_paged
    _ORIGINAL["topk_paged"] = real

    def topk_paged(q: Any, w: Any, pages: Any, table: Any, request: Any, visible: Any, topk: int, page: int) -> Any:
        import torch

        out = real(q, w, pages, table, request, visible, topk, page)
        for row in (visible > topk).nonzero().flatten().tolist():
            at = torch.arange(int(visible[row]))
            slots = table[request[row].long()].long()[at // page] * page + at % page
            keys = pages.flatten(0, 1)[slots].double()
            scores = (torch.relu(q[row].double() @ keys.T) * w[row].double()[:, None]).sum(0).float()
            order = torch.sort(scores.flip(0), descending=True, stable=True).indices
            out[row] = (len(at) - 1 - order[:topk]).sort().values.int()
        return out

    select.topk_paged = topk_paged


def undo(worker: Any) -> None:
    """Back to the real code."""
    if "topk_paged" in _ORIGINAL:
        _select().topk_paged = _ORIGINAL.pop("topk_paged")


_ORIGINAL: dict[str, Any] = {}


def _select() -> Any:
    from pcp_kernels.reference import select

    return select


def _runtime() -> Any:
    from pcp_passes.frontends.vllm import runtime

    return runtime.current()


def _name(function: str) -> str:
    return f"{__name__}:{function}"


#: Functions run before the group of each; the gather is broken last, because it leaves holes in the caches.
FAULTS = {
    "selection_of_another_row": (_name("selection_of_another_row"),),
    "own_key_unseen_on_rank_1": (_name("undo"), _name("own_key_unseen_on_rank_1")),
    "ties_from_the_end": (_name("undo"), _name("ties_from_the_end")),
    "none": (_name("undo"),),
    "gather_dropped": (sabotage.qualified("gather_dropped"),),
}


def _prompts(seed: int) -> tuple[Request, ...]:
    """Prompts of their own for each fault: one that comes again is found in the prefix cache."""
    return tuple(Request(prompt(n, seed=seed), 8) for n in (37, 61, 90))


def group_of(case: str) -> int:
    """Index of the group of a case or a fault."""
    return 1 + [*CASES, "stop", *FAULTS].index(case)


@functools.cache
def engine(model: str, pcp: int) -> Result:
    """GLM's form runs uncompiled on one rank and as rewritten graphs on two; DeepSeek's as captured graphs on one,
    which nothing rewrites, and compiled on two. Uncompiled, with vLLM's own choice of custom ops, whose rotary kernel
    for CPUs reads several heads wrongly."""
    glm = model == "glm_moe_dsa"
    groups = [Group(rpc=(f"{PROBE}:start",)), *(getattr(cases, name)() for name in CASES)]
    groups.append(Group(rpc=(f"{PROBE}:stop", f"{PROBE}:report")))
    if glm:
        groups += [Group(_prompts(60 + i), rpc if pcp > 1 else ()) for i, rpc in enumerate(FAULTS.values())]
    session = Session(
        model=str(dsa_models.build(model)),
        groups=tuple(groups),
        pcp=pcp,
        options={"decode": "owner", "poison": True} if glm else {},
        mode=0 if glm and pcp == 1 else 2,
        backend="eager" if glm or pcp == 1 else "inductor",
        engine={
            "max_model_len": 256,
            "max_num_seqs": 32,
            "max_num_batched_tokens": BUDGET,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
            **({"compilation_config": {"mode": 0}} if glm and pcp == 1 else {}),
        },
        env={"VLLM_DISABLE_COMPILE_CACHE": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"},
    )
    return run(session, timeout_s=420)


def probed(model: str, pcp: int, rank: int = 0) -> dict[str, Any]:
    """What the probe of one worker returned."""
    found: dict[str, Any] = engine(model, pcp).rpc[group_of("stop")][0][rank]
    return found


def steps_of(model: str, pcp: int, case: str, what: str, rank: int = 0) -> list[dict[int, Any]]:
    """``what`` (``accepted`` or ``drafts``) in every step of a case, by request."""
    group = str(group_of(case))
    steps = [
        {int(key.split("-")[1]): value for key, value in step.items() if key.split("-")[0] == group}
        for step in probed(model, pcp, rank)[what]
    ]
    return [step for step in steps if step]
