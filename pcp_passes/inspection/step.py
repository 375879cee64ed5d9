# SPDX-License-Identifier: Apache-2.0
"""The step program of a target and its MTP drafter from a configuration alone, and what it moves.

Nothing is run and no weight is read: parameters are on the ``meta`` device. One layer of each kind is captured, and
what it gathers is counted as often as the kind occurs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pcp_passes.errors import ConfigError
from pcp_passes.inspection.layers import LayerKind, find_stack, keep_one_of_each
from pcp_passes.inspection.run import DTYPES
from pcp_passes.inspection.step_indexers import StepIndexer, step_indexers
from pcp_passes.layout import Batch, build_layout
from pcp_passes.passes.base import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step.program import StepProgram
from pcp_passes.step.report import StepReport, sizes_of, step_report

DRAFTERS = ("mtp",)


@dataclass(frozen=True)
class ModelStep:
    """A step of a model: one prompt, prefilled whole."""

    model: str
    drafter: str
    layout: str
    dtype: str
    layers: int
    """Of the target, all of them."""
    captured: int
    """Of these, one of each kind."""
    step: StepReport
    indexers: tuple[StepIndexer, ...] = ()
    """Of target and drafter; none where attention is dense."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "model": self.model, "drafter": self.drafter, "layout": self.layout, "dtype": self.dtype,
            "layers": self.layers, "captured_layers": self.captured, **self.step.to_json(),
            "indexers": [line.to_json() for line in self.indexers],
        }  # fmt: skip


def inspect_step_config(
    config: Mapping[str, Any],
    *,
    name: str = "",
    drafter: str = "mtp",
    steps: int = 3,
    pcp: int = 2,
    tokens: int = 32768,
    layout: str = "zigzag",
    dtype: str = "bf16",
    full: bool = False,
) -> tuple[ModelStep, StepProgram]:
    """Build the step program of a configuration and count the step that prefills one prompt.

    Args:
        config: in the format of transformers, with ``model_type``.
        name: what the report calls the model; its type by default.
        drafter: ``mtp``, the next-token module of DeepSeek and GLM models.
        steps: K.
        pcp: P, at least 2.
        tokens: T, length of the prompt.
        layout, dtype: as for :func:`pcp_passes.inspection.run.inspect_config`.
        full: capture every layer instead of one of each kind.

    Raises:
        ConfigError: an option or the configuration is wrong.
        Refusal: the model cannot be captured.
    """
    if drafter not in DRAFTERS:
        raise ConfigError(f"unknown drafter {drafter!r}; a configuration can be inspected with {', '.join(DRAFTERS)}")
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r}; accepted: {', '.join(DTYPES)}.")
    if pcp < 2:
        raise ConfigError(f"pcp is {pcp}; required at least 2: a step program of one rank moves nothing")
    length, none = np.array([tokens], dtype=np.int32), np.zeros(1, dtype=np.int32)
    laid_out = build_layout(Batch(length, none, length), pcp, kind=layout)
    model, kinds, count = _weightless(config, DTYPES[dtype], full)
    times = {f"target.{place}": kind.times for place, kind in enumerate(kinds)}
    ctx = PassContext(pcp)
    target, module = _capture(model, ctx)
    program = StepProgram(target, MTP(module, steps), pcp=pcp)
    report = step_report(program, sizes_of(laid_out, [tokens - 1]), times=times)
    assert program.sharded is not None, "a step program of several ranks has a sharded part"
    indexers = step_indexers(program.sharded, report, kinds, count)
    called = name or str(config["model_type"])
    return ModelStep(called, drafter, layout, dtype, count, len(target.layers), report, indexers), program


def _weightless(config: Mapping[str, Any], dtype: torch.dtype, full: bool) -> tuple[Any, tuple[LayerKind, ...], int]:
    """The model on ``meta``, the kind that each captured layer stands for, and the number of its layers."""
    model = model_on_meta(config, dtype)
    stack = find_stack(model, model.config)
    count = int(model.config.num_hidden_layers)
    if full or not stack.path:
        return model, (), count
    keep_one_of_each(model, model.config, stack)
    return model, stack.kinds, count


def model_on_meta(config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """The causal language model of a configuration, without memory for its weights.

    Raises:
        ConfigError: transformers is missing or does not know the model type.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("inspecting a configuration needs transformers: pip install transformers.") from error
    given = dict(config)
    kind = given.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"transformers knows no model type {kind!r}; give a configuration that it has")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind].from_dict(given), dtype=dtype)
    return model.eval().requires_grad_(False)


def _capture(model: Any, ctx: PassContext) -> tuple[Any, Any]:
    from pcp_passes.frontends.transformers.target import load_target

    return load_target(model, ctx=ctx), capture_mtp(model, ctx)


def capture_mtp(model: Any, ctx: PassContext) -> Any:
    """The next-token module of a model on ``meta``, with weights that are as little there."""
    from pcp_passes.frontends.transformers.mtp import MTPLayer, load_mtp

    with torch.device("meta"):
        layer = MTPLayer(model)
        prefix = f"model.layers.{layer.index}."
        names = {name for name in layer.state_dict() if not name.startswith(("embed_tokens", "rotary"))}
        tensors = {prefix + name.removeprefix("block."): layer.state_dict()[name] for name in names}
        return load_mtp(model, tensors, ctx=ctx)
