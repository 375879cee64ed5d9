# SPDX-License-Identifier: Apache-2.0
"""A model on the ``meta`` device, from its configuration alone, and its captured graph. No weight is allocated."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch.capture import Capture, DynamoGraph, capture

logger = logging.getLogger(__name__)

_WHERE = re.compile(r'File "([^"]+)", line (\d+)')


def build_on_meta(config: Mapping[str, Any], dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """The causal language model of a configuration, and the configuration object it reads while it runs.

    Raises:
        ConfigError: transformers is missing or does not know the model type, or refuses the configuration.
    """
    try:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("inspecting a configuration needs transformers: pip install transformers.") from error
    given = dict(config)
    kind = given.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(
            f"transformers knows no model type {kind!r}. Code that comes with a model is not run: give the "
            "configuration of a type that this release of transformers has, or install a newer one."
        )
    attempts = []
    for attention in ("sdpa", "eager"):
        try:
            parsed = CONFIG_MAPPING[kind].from_dict(given)
            parsed.use_cache = False
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(parsed, attn_implementation=attention, dtype=dtype)
        except Exception as error:  # transformers raises whatever the configuration trips over
            attempts.append(f"{type(error).__name__}: {error}")
            continue
        model = model.to(dtype).eval().requires_grad_(False)
        return model, model.config.get_text_config(decoder=True)
    raise ConfigError(f"transformers cannot build a causal language model of this {kind} configuration: {attempts[0]}")


class _Captured(Exception):
    """Ends the call that made Dynamo trace the model: nothing is to be run."""


def capture_model(model: nn.Module, tokens: int, rows: int) -> Capture:
    """Capture ``model(input_ids)`` with any number of tokens; its logits are the only output.

    Args:
        model: on the ``meta`` device.
        tokens: T, as the hint of the symbol.
        rows: M, likewise.

    Raises:
        Refusal: the model is not one graph that holds for any number of tokens.
    """
    held: dict[str, Any] = {}

    def backend(gm: Any, _: Any) -> Callable[..., Any]:
        held["graph"] = DynamoGraph.read(gm)

        def stop(*arguments: Any) -> Any:
            held["arguments"] = arguments
            raise _Captured

        return stop

    ids = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    torch._dynamo.maybe_mark_dynamic(ids, 1)
    torch._dynamo.reset()
    try:
        with torch.no_grad():
            torch.compile(_call_of(model), backend=backend, fullgraph=True)(ids)
    except _Captured:
        pass
    except Exception as error:  # Dynamo wraps whatever the model raises
        raise _not_captured(model, error) from error
    finally:
        torch._dynamo.reset()
    captured = capture(held["graph"], held["arguments"], rows=rows, tokens={"input_ids": 1})
    special = captured.space.specialised()
    if special:
        raise Refusal(
            "this model holds for one length only, so its tokens cannot be split.",
            [("found", "; ".join(special)), ("required", "a graph for any number of tokens"),
             ("next", "change the model where it compares the number of tokens with a constant")],
        )  # fmt: skip
    return captured


def _call_of(self: nn.Module) -> Callable[[torch.Tensor], Any]:
    """Dynamo names what the module holds by this variable."""

    def call(input_ids: torch.Tensor) -> Any:
        out = self(input_ids=input_ids, use_cache=False)
        return out.logits if hasattr(out, "logits") else out[0]

    return call


def _not_captured(model: nn.Module, error: Exception) -> Refusal:
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    frames = [f"{file.rpartition('/')[2]}:{line}" for file, line in _WHERE.findall(str(error))]
    details = [("found", f"{type(error).__name__}: {text[0] if text else 'no message'}")]
    details += [("source", frames[-1])] if frames else []
    details.append(("next", "change the model there, or shard the parts of it that can be captured"))
    return Refusal(f"{type(model).__name__} cannot be captured as one graph.", details)
