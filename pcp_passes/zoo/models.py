# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of transformers: small enough for a test, random enough that every token matters.

A model with the weights that transformers gives it at random hardly looks at its context: logits barely move when an
early token changes, and a run that lost half of the tokens would pass. :func:`randomise` therefore draws every matrix
at the scale that keeps activations near 1, and leaves alone what has a meaning of its own (decay rates, frequencies).
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

import torch
from torch import nn

from pcp_passes.errors import ConfigError
from pcp_passes.zoo.shrink import VOCAB, small_config, too_large

#: Lengths that every type is checked at, and the one past the fixed chunk of 64 tokens of the delta-rule kernels.
LENGTHS = (7, 33, 48, 64)
PAST_CHUNK = 80
_CHUNKED = re.compile(r"deltanet|mamba2|kimidelta|rwkv|xlstm", re.IGNORECASE)

#: Parameters with a meaning beyond their scale: decays, time steps, frequencies, slopes, learned scales.
_KEPT = re.compile(
    r"A_log|\.A$|\.D$|dt_bias|time_(decay|first|mix|maaaa)|inv_freq|recurrent_param|slopes|rotary|kv_scale|e_score"
    r"|learned_scale"
)
_EMBEDDING = re.compile(r"embed|wte|wpe|word_emb|tok_emb|position", re.IGNORECASE)

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How to build one type.

    Attributes:
        name: model type of transformers, with a variant behind an ``@``.
        values: of the configuration; ``None`` for one that is shrunk automatically.
        adjust: values on top of an automatic one, where small sizes have to fit together.
        family: kind of token mixing.
    """

    name: str
    values: Mapping[str, Any] | None = field(default=None, compare=False)
    adjust: Mapping[str, Any] | None = field(default=None, compare=False)
    family: str = "other"

    @property
    def model_type(self) -> str:
        """The name that transformers knows."""
        return self.name.partition("@")[0]


@lru_cache(maxsize=1)
def recipes() -> dict[str, Recipe]:
    """The chosen types, one for each kind of token mixing, by name."""
    data = _data()
    return {name: Recipe(name, values, family=data["family"][name]) for name, values in data["configs"].items()}


@lru_cache(maxsize=1)
def _data() -> dict[str, dict[str, Any]]:
    data: dict[str, dict[str, Any]] = json.loads(files("pcp_passes.zoo").joinpath("configs.json").read_text())
    return data


def all_types() -> list[str]:
    """Every causal language model that the installed transformers knows, by model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def recipe(name: str) -> Recipe:
    """The recipe of a type: a chosen one, or one that is shrunk from its default configuration.

    Raises:
        ConfigError: transformers has no such causal language model.
    """
    chosen = recipes()
    if name in chosen:
        return chosen[name]
    known = all_types()
    if name not in known:
        from difflib import get_close_matches

        near = get_close_matches(name, [*chosen, *known], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"transformers has no causal language model of type {name!r}.{hint} Known without building one: "
            f"{', '.join(chosen)}; all {len(known)} with --all."
        )
    return Recipe(name, adjust=_data()["adjust"].get(name))


def build(name: str, seed: int = 0) -> nn.Module:
    """A model in evaluation mode, f32, without gradients; its ``forward`` returns logits f32[1, T, 256].

    Raises:
        ConfigError: there is no such type, or a shrunk model is still large.
        Exception: whatever transformers raises when it cannot be built this small.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    wanted = recipe(name)
    configuration_class = CONFIG_MAPPING[wanted.model_type]
    torch.manual_seed(seed)
    if wanted.values is None:
        configuration = small_config(configuration_class, wanted.adjust)
        with torch.device("meta"):
            large = too_large(AutoModelForCausalLM.from_config(configuration).named_parameters())
        if large:
            raise ConfigError(f"{name} cannot be made small enough: {large}.")
    else:
        configuration = configuration_class(**wanted.values)
    configuration.use_cache = False
    model: nn.Module = _with_sdpa(AutoModelForCausalLM, configuration)
    model = model.float().eval()
    randomise(model, seed)
    return model.requires_grad_(False)


def _with_sdpa(auto_class: Any, configuration: Any) -> Any:
    try:
        return auto_class.from_config(configuration, attn_implementation="sdpa", dtype=torch.float32)
    except ValueError as error:  # gpt_oss: sinks have no SDPA form
        if "attn_implementation" not in str(error) and "does not support" not in str(error):
            raise
    return auto_class.from_config(configuration, attn_implementation="eager", dtype=torch.float32)


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Draw all weights anew so that logits depend on the whole context; the same for a seed on every machine."""
    generator = torch.Generator().manual_seed(1234 + seed)
    hidden = int(getattr(model.config.get_text_config(decoder=True), "hidden_size", 64) or 64)  # type: ignore[operator, union-attr]
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # shared ones come once
            if not parameter.is_floating_point() or _KEPT.search(name):
                continue
            if not torch.isfinite(parameter).all() or parameter.abs().max() > 1e3:  # never initialised
                parameter.zero_()
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2 and parameter.numel() > 1:
                parameter.copy_(noise * _scale(name, parameter, hidden))
            else:
                parameter.add_(noise * 0.1)
        for buffer in model.buffers():
            if buffer.is_floating_point() and not torch.isfinite(buffer).all():
                buffer.zero_()


def _scale(name: str, parameter: torch.Tensor, hidden: int) -> float:
    if parameter.dim() == 2:
        return 0.5 if _EMBEDDING.search(name) else 1 / math.sqrt(max(parameter.shape[1], 4))
    if parameter.dim() == 3 and min(parameter.shape[1:]) >= 16:  # one matrix for each expert
        return 1 / math.sqrt(hidden)
    return 1 / math.sqrt(max(parameter[0].numel(), 2))


def make_inputs(model: nn.Module, length: int, seed: int = 0) -> Inputs:
    """Keyword arguments of a call on one random prompt: ``input_ids`` i64[1, length], no cache."""
    generator = torch.Generator().manual_seed(77 + seed)
    inputs: Inputs = {"input_ids": torch.randint(3, VOCAB - 1, (1, length), generator=generator)}
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs["use_cache"] = False
    return inputs


def logits_of(output: Any) -> torch.Tensor:
    """The logits of a model's result, f32[1, T, 256]."""
    logits: torch.Tensor = output.logits if hasattr(output, "logits") else output[0]
    return logits


def call(model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Logits of the model itself, in eager mode."""
    with torch.no_grad():
        return logits_of(model(**inputs))


def lengths_for(model: nn.Module) -> tuple[int, ...]:
    """Lengths to check a model at."""
    chunked = any(_CHUNKED.search(type(module).__name__) for module in model.modules())
    return (*LENGTHS, PAST_CHUNK) if chunked else LENGTHS
