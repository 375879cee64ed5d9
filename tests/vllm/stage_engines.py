# SPDX-License-Identifier: Apache-2.0
"""Engines with pipeline stages that draft with the checkpoint's own module, and what they run."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from pcp_passes.frontends.vllm.session import Group, Request, Session
from tests.models import MODELS, TinyModel, prompt
from tests.vllm import mtp_engines, squeeze, stage_faults
from tests.vllm.cases import ragged, waves
from tests.vllm.engines import FULL, Engine, reference

_GLM = MODELS["tiny_glm_mtp"]
#: vLLM wants an expert layer of this model in every stage: the first gets the dense layer and one of the two others.
GLM = "tiny_glm_stages"
MODELS[GLM] = TinyModel(
    "glm4_moe", {**_GLM.fields, "num_hidden_layers": 3}, gain=_GLM.gain, habit=_GLM.habit, mtp=_GLM.mtp
)


@dataclass(frozen=True)
class Staged(Engine):
    """An engine with ``pp`` stages. ``more`` holds further engine arguments."""

    pp: int = 2
    more: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"pp{self.pp}-{super().__str__()}" + "".join(f"-{key}" for key in self.more)

    def session(self) -> Session:
        """See :class:`Engine`."""
        session = super().session()
        return replace(session, pp=self.pp, engine=session.engine | self.more)


def staged(engine: Engine, **changes: Any) -> Staged:
    """``engine`` with stages."""
    return Staged(**{f.name: getattr(engine, f.name) for f in fields(engine)} | changes)


def reused() -> Group:
    """Requests leave while a step of theirs is in flight, and others take their rows in the same step."""
    keep = [Request(prompt(n, seed=60), 16) for n in (9, 20)]
    leave = [Request(prompt(5 + n, seed=61 + n), 60, abort=5 + n) for n in range(8)]
    come = [Request(prompt(4 + n, seed=71 + n), 8, arrive=5 + n) for n in range(8)]
    return Group((*keep, *leave, *come))


def reused_again() -> Group:
    """The same with other prompts, which no cache of prefixes holds."""
    keep = [Request(prompt(n, seed=80), 16) for n in (9, 20)]
    leave = [Request(prompt(5 + n, seed=81 + n), 60, abort=5 + n) for n in range(8)]
    come = [Request(prompt(4 + n, seed=91 + n), 8, arrive=5 + n) for n in range(8)]
    return Group((*keep, *leave, *come))


def _told(*names: str, requests: tuple[Request, ...] = ()) -> Group:
    return Group(requests, tuple(stage_faults.qualified(name) for name in names))


FAULTS = ("drafts_not_shipped", "rejections_forgotten", "rows_rolled", "none")
#: Two stages of two PCP ranks each; both graphs rewritten; the scheduler waits for each step. The last extra groups
#: are short of cache blocks. Ends with a stage that fails, whose answers nobody waits for.
SHARDED = staged(
    mtp_engines.MLA,
    extra=(
        *(_told("undo", *([name] if name != "none" else []), requests=ragged().requests) for name in FAULTS),
        _told("undo"),
        Group(front=(f"{squeeze.__name__}:tighten",)),
        ragged(),
        Group(waves().requests, front=(f"{squeeze.__name__}:loosen",)),
    ),
    doomed=stage_faults.qualified("fail_in_the_first_stage"),
)
_GLM_1 = replace(mtp_engines.stock(GLM, 2), extra=(reused(), reused_again()))
#: Two stages, and a scheduler that runs ahead; ends with a stage that stops.
AHEAD = staged(
    _GLM_1,
    mode=2,
    backend="eager",
    options={"silence_s": 6},
    more={"async_scheduling": True},
    extra=(
        _told("record"),
        reused(),
        _told("recorded", "freed"),
        _told("generations_ignored", requests=reused_again().requests),
        _told("undo"),
    ),
    doomed=stage_faults.qualified("freeze_the_first_stage"),
)
#: Both at once; and a dense model in pieces, without drafts.
BOTH = staged(
    replace(_GLM_1, extra=()), pcp=2, mode=2, backend="eager", options={"poison": True}, more={"async_scheduling": True}
)
DENSE = staged(
    Engine("tiny_gqa", mode=3, backend="eager", budget=64, options={"poison": True}, cases=mtp_engines.CASES)
)
#: What `make test` runs, and what a full run adds.
COVER = (SHARDED, AHEAD)
ENGINES = (*COVER, BOTH, DENSE) if FULL else COVER
REFERENCES: dict[str, Engine] = {str(SHARDED): mtp_engines.stock("tiny_mla_mtp", 2), str(AHEAD): _GLM_1}
if FULL:
    REFERENCES |= {str(BOTH): _GLM_1, str(DENSE): replace(reference("tiny_gqa"), cases=mtp_engines.CASES)}
#: vLLM without us, until its first error.
STOCK = staged(
    mtp_engines.stock("tiny_mla_mtp", 2),
    cases=(),
    extra=(_told("end_at_the_first_error"), Group(ragged().requests)),
)
