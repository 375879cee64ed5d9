# SPDX-License-Identifier: Apache-2.0
"""Programs of the shipped checkpoints beside those of ``tests.engine_schedules``: the block drafter, and float32."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pcp_passes.engine.bodies import Model
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step import StepProgram
from tests.engine_schedules import CHECKPOINT, glm_hf

BLOCK_CHECKPOINT = CHECKPOINT.with_name("tiny-dspark")


@functools.cache
def _target_with_states() -> Model:
    from pcp_passes.frontends.transformers.target import load_target
    from pcp_passes.speculative.dspark_model import DSparkConfig

    layers = DSparkConfig.read(BLOCK_CHECKPOINT).target_layer_ids
    return load_target(glm_hf(), aux_layers=layers, ctx=PassContext(1))


@functools.cache
def dspark_program(pcp: int, steps: int) -> StepProgram:
    """The shipped GLM-DSA with the shipped block drafter, in float64."""
    from pcp_passes.speculative.dspark import capture_dspark
    from pcp_passes.speculative.dspark_model import load_dspark

    hf = glm_hf()
    embedding, head = hf.get_input_embeddings().weight, hf.get_output_embeddings().weight
    drafter = capture_dspark(load_dspark(BLOCK_CHECKPOINT, embedding, head), steps)
    return StepProgram(_target_with_states().over(PassContext(pcp)), drafter, pcp=pcp)


@functools.cache
def _float32_models() -> tuple[Model, Model]:
    from transformers import AutoModelForCausalLM

    from pcp_passes.frontends.transformers.mtp import load_mtp
    from pcp_passes.frontends.transformers.target import load_target

    hf: Any = AutoModelForCausalLM.from_pretrained(
        CHECKPOINT, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    return load_target(hf, ctx=PassContext(1)), load_mtp(hf, CHECKPOINT, ctx=PassContext(1))


@functools.cache
def float32_program(pcp: int, steps: int) -> StepProgram:
    """The shipped GLM-DSA with its MTP layer, in float32: for what is reported and not judged."""
    target, drafter = (model.over(PassContext(pcp)) for model in _float32_models())
    return StepProgram(target, MTP(drafter, steps), pcp=pcp)
