# SPDX-License-Identifier: Apache-2.0
"""A model without weights, from its configuration alone, and its captured graph.

Its parameters are fake tensors: sizes and dtypes that say they are on a CPU and hold no memory. They are not plain
tensors of the ``meta`` device, because models make constants on the device of their inputs, and Dynamo keeps a constant
on ``meta`` apart from the fake tensors it traces with.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch.capture import Capture, DynamoGraph, capture
from pcp_passes.frontends.torch.inputs import choose_tokens

_WHERE = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True, eq=False)
class Weightless:
    """A causal language model whose tensors are fake.

    Attributes:
        config: what the model reads while it runs; of the decoder, where a model has several.
        mode: of its tensors.
    """

    model: nn.Module
    config: Any
    mode: FakeTensorMode


def build_weightless(config: Mapping[str, Any], dtype: torch.dtype) -> Weightless:
    """The causal language model of a configuration, in evaluation mode and without a cache.

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
            mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
            with mode:
                model = AutoModelForCausalLM.from_config(parsed, attn_implementation=attention, dtype=dtype)
        except Exception as error:  # transformers raises whatever the configuration trips over
            attempts.append(f"{type(error).__name__}: {error}")
            continue
        model.eval().requires_grad_(False)
        return Weightless(model, model.config.get_text_config(decoder=True), mode)
    raise ConfigError(f"transformers cannot build a causal language model of this {kind} configuration: {attempts[0]}")


class _Captured(Exception):
    """Ends the call that made Dynamo trace the model: nothing is to be run."""


def capture_model(built: Weightless, tokens: int, rows: int) -> Capture:
    """Capture ``model(input_ids)`` with any number of tokens; its logits are the only output.

    Args:
        built: the model.
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

    model = built.model
    with built.mode:
        ids = torch.zeros(1, tokens, dtype=torch.int64)
    torch._dynamo.maybe_mark_dynamic(ids, 1)
    torch._dynamo.reset()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"torch\._dynamo.*")  # remarks about the model's Python
            torch.compile(_call_of(model), backend=backend, fullgraph=True)(ids)
    except _Captured:
        pass
    except Exception as error:  # Dynamo wraps whatever the model raises
        raise _not_captured(model, error) from error
    finally:
        torch._dynamo.reset()
    choice = choose_tokens(held["graph"].inputs, {"input_ids": 1})
    if not choice.symbols:
        raise _one_length(choice.why_static)
    captured = capture(held["graph"], held["arguments"], rows=rows, choice=choice)
    special = captured.space.specialised()
    if special:
        raise _one_length("; ".join(special))
    return captured


def _one_length(found: str) -> Refusal:
    return Refusal(
        "this model holds for one length only, so its tokens cannot be split.",
        [("found", found), ("required", "a graph for any number of tokens"),
         ("next", "change the model where it compares the number of tokens with a constant")],
    )  # fmt: skip


def _call_of(self: nn.Module) -> Callable[[torch.Tensor], Any]:
    """Dynamo names what the module holds by this variable."""

    def call(input_ids: torch.Tensor) -> Any:
        out = self(input_ids=input_ids, use_cache=False)
        return out.logits if hasattr(out, "logits") else out[0]

    return call


def _not_captured(model: nn.Module, error: Exception) -> Refusal:
    text = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in text if line.startswith("Explanation:")] or text[:1] or ["no message"]
    frames = [f"{file.rpartition('/')[2]}:{line}" for file, line in _WHERE.findall(str(error))]
    details = [("found", f"{type(error).__name__}: {told[0].removeprefix('Explanation: ')}")]
    details += [("source", frames[-1])] if frames else []
    details.append(("next", "change the model there, or shard the parts of it that can be captured"))
    return Refusal(f"{type(model).__name__} cannot be captured as one graph.", details)
