# SPDX-License-Identifier: Apache-2.0
"""Random schedules on meshes of stages, replicas and PCP ranks: each replica gives what one rank gives.

All run under ``make soak``, sixty of each composition; a tenth under ``make test``. Float64, drafts, and as many steps
in flight as there are stages.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from pcp_passes.engine.bodies import Model
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step.program import StepProgram
from tests import models as tiny
from tests.engine_schedules import CHECKPOINT, ProgramOf, glm_hf, glm_models, small_program
from tests.engine_schedules import VOCAB as GLM_VOCAB
from tests.mesh_programs import mesh_program
from tests.mesh_schedules import MESHES, check_mesh
from tests.soak.record import Part

SEEDS = range(5000, 5060)
DENSE = {"pp2": small_program, "pp2-pcp2": small_program, "dp2-independent": small_program}
"""Compositions that run on a dense model of two layers too; all run on one with experts."""
CASES = [(name, mesh_program) for name in MESHES] + list(DENSE.items())
_IDS = [f"{name}-{'dense' if program is small_program else 'moe'}" for name, program in CASES]
_LIKE_OTHERS = ("fold2", "fold2-dp2-ep4", "pcp2-ep2", "dp2-independent")
"""Run what another composition runs, or a part of it: once under ``make test``."""


def _require_hard_cases(name: str, totals: dict[str, int]) -> None:
    """When all schedules of a composition have run: what is hard happened."""
    mesh = MESHES[name]
    wanted = ["accepted", "preemptions", "aborts", "cached"]
    wanted += ["sharded"] if mesh.get("pcp", 1) > 1 else []
    wanted += ["dummies"] if mesh.get("dp", 1) > 1 and mesh.get("expert_parallel") else []
    missing = [what for what in wanted if not totals[what]]
    assert not missing, f"{name}: {len(SEEDS)} schedules without any {', '.join(missing)}"


def _record(name: str, model: str, totals: dict[str, int]) -> None:
    """One part of ``build/soak.json`` per composition and model."""
    part = Part(f"mesh-{name}")
    part.count({"schedules": len(SEEDS), f"{model} schedules": len(SEEDS), **totals})
    part.save(f"mesh-{name}-{model}")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "program_of"), CASES, ids=_IDS)
def test_schedules(name: str, program_of: ProgramOf) -> None:
    totals = check_mesh(name, SEEDS, program_of, longest=60)
    _record(name, "dense" if program_of is small_program else "moe", totals)
    _require_hard_cases(name, totals)


@pytest.mark.unit
@pytest.mark.parametrize(("name", "program_of"), CASES, ids=_IDS)
def test_a_tenth(name: str, program_of: ProgramOf) -> None:
    few = name in _LIKE_OTHERS or program_of is small_program
    totals = check_mesh(name, SEEDS[:: 60 if few else 10], program_of)
    assert totals["accepted"] > 0 or few


@functools.cache
def _glm_models(pcp: int) -> tuple[Model, Model]:
    """The shipped GLM-DSA, whose drafter has an own table: a copy of the target's, as some checkpoints hold it."""
    from pcp_passes.frontends.transformers.mtp import load_mtp, read_layer

    if pcp != 1:
        return glm_models(pcp)[0], _glm_models(1)[1].over(PassContext(pcp))
    model: Any = glm_hf()
    layer = model.config.num_hidden_layers
    tensors = read_layer(CHECKPOINT, layer)
    tensors |= {f"model.layers.{layer}.embed_tokens.weight": model.get_input_embeddings().weight.detach()}
    return glm_models(1)[0], load_mtp(model, tensors, ctx=PassContext(1), own_embedding=True)


@functools.cache
def glm_mesh_program(pcp: int, steps: int) -> StepProgram:
    """MLA, sparse indexing with shared layers, experts, and MTP."""
    target, drafter = _glm_models(pcp)
    return StepProgram(target, MTP(drafter, steps), pcp=pcp)


@functools.cache
def _mla_models() -> tuple[Model, Model]:
    from transformers import AutoModelForCausalLM

    from pcp_passes.frontends.transformers.mtp import load_mtp, read_layer
    from pcp_passes.frontends.transformers.target import load_target

    folder = tiny.build("tiny_mla_mtp")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()
    layer = model.config.num_hidden_layers
    name = f"model.layers.{layer}.embed_tokens.weight"
    tensors = {name: model.get_input_embeddings().weight.detach()} | read_layer(folder, layer)
    return load_target(model, ctx=PassContext(1)), load_mtp(model, tensors, ctx=PassContext(1), own_embedding=True)


@functools.cache
def mla_program(pcp: int, steps: int) -> StepProgram:
    """Two MLA layers and MTP."""
    target, drafter = (model.over(PassContext(pcp)) for model in _mla_models())
    return StepProgram(target, MTP(drafter, steps), pcp=pcp)


GLM = ("pp2", "pp3", "pp2-pcp2", "dp2", "dp2-pcp2-ep4", "dp2-pcp2-pp2-ep4")
MLA = ("pp2", "pp2-pcp2")
_REAL = [(name, glm_mesh_program, GLM_VOCAB) for name in GLM] + [(name, mla_program, tiny.VOCAB_SIZE) for name in MLA]
_REAL_IDS = [f"{name}-{'glm' if name_of is glm_mesh_program else 'mla'}" for name, name_of, _ in _REAL]


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "program_of", "vocab"), _REAL, ids=_REAL_IDS)
def test_published_architectures(name: str, program_of: ProgramOf, vocab: int) -> None:
    totals = check_mesh(name, SEEDS, program_of, vocab=vocab, longest=120)
    _record(name, "glm" if program_of is glm_mesh_program else "mla", totals)
    _require_hard_cases(name, totals)


_SOME = {"full-glm": _REAL[5], "pp3-glm": _REAL[1], "pp2-pcp2-mla": _REAL[-1]}


@pytest.mark.unit
@pytest.mark.parametrize("case", _SOME)
def test_some_published_architectures(case: str) -> None:
    name, program_of, vocab = _SOME[case]
    check_mesh(name, SEEDS[:1], program_of, vocab=vocab, longest=60)
