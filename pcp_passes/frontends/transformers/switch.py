# SPDX-License-Identifier: Apache-2.0
"""Switch an unmodified model of transformers to the ``"pcp"`` attention and back.

Private names of transformers are read here and in ``masks.py`` only; checked against 5.19 and 5.24.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.transformers.attention import pcp_attention_forward
from pcp_passes.frontends.transformers.masks import PACKED, pcp_mask

logger = logging.getLogger(__name__)

PCP = "pcp"
Positions = Literal["auto", "consecutive", "packed"]

# Sparse-attention models fold their selection of keys into the mask for implementations that they know by name.
_ASKS_FOR_SDPA = re.compile(r"_attn_implementation\s*(?:==|!=|in|not in)\s[^\n#]*['\"]sdpa['\"]")


def register() -> None:
    """Make ``attn_implementation="pcp"`` known to transformers. Idempotent."""
    AttentionInterface.register(PCP, pcp_attention_forward)
    AttentionMaskInterface.register(PCP, pcp_mask)


def why_unsupported(model: torch.nn.Module) -> str | None:
    """The reason why ``model`` cannot run with the ``"pcp"`` attention, or ``None`` when it can.

    A model that cannot keeps its own attention and its explicit masks; nothing else is lost.
    """
    found = _unsupported(model)
    return f"{found[0]} {found[1]}" if found else None


def _unsupported(model: torch.nn.Module) -> tuple[str, str] | None:
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        return type(model).__name__, "holds no PreTrainedModel of transformers"
    for cls in dict.fromkeys(type(module) for module in models):
        if not cls._can_set_attn_implementation():
            return cls.__name__, "does not go through transformers' AttentionInterface"
        if _ASKS_FOR_SDPA.search(_source(cls)):
            return cls.__name__, "masks by the name of its attention implementation (eager, sdpa)"
    return None


def _source(cls: type) -> str:
    module = sys.modules.get(cls.__module__)
    try:
        return inspect.getsource(module) if module is not None else ""
    except (OSError, TypeError):
        return ""  # typed in at a prompt; transformers has refused it already


@contextmanager
def pcp_attention(model: torch.nn.Module, *, positions: Positions = "auto") -> Iterator[None]:
    """Let ``model`` attend through ``pcp::attend`` for the length of a ``with`` block.

    Capture, and run what needs the model's own forward, inside the block. The configuration of the model and of all
    its parts is restored at the end, also after an exception. Plain causal, sliding, chunked and bidirectional masks
    become positions; all others stay explicit tensors, with the results of ``sdpa`` or ``eager``.

    Args:
        model: a ``PreTrainedModel``, or a module that holds some.
        positions: what is known of ``position_ids`` while tracing, when their values cannot be read.
            ``"auto"``: a call of ``model`` without them counts up one sequence per row; a call with them may pack
            several, so its mask stays explicit. Calls of inner modules, which this function cannot see, count as with.
            ``"consecutive"``: they count up by one along every row, given or not; the caller has made sure, see
            :func:`~pcp_passes.frontends.transformers.masks.one_sequence_per_row`.
            ``"packed"``: always keep the mask explicit.

    Raises:
        Refusal: the model does not go through the interface (its own attention still works), see
            :func:`why_unsupported`.
        ConfigError: ``positions`` has another value.
    """
    if positions not in ("auto", "consecutive", "packed"):
        raise ConfigError(f"positions={positions!r}; required 'auto', 'consecutive' or 'packed'")
    unsupported = _unsupported(model)
    if unsupported is not None:
        raise Refusal(
            f'{unsupported[0]} cannot run with attn_implementation="{PCP}"',
            [
                ("reason", unsupported[1]),
                ("next", "run it without pcp_attention: it keeps its own attention and its explicit masks"),
            ],
        )
    register()
    configs = configs_of(model)
    before = [config._attn_implementation_internal for config in configs]
    excluded = PACKED.excluded
    with ExitStack() as stack:
        stack.enter_context(PACKED.installed())
        if positions == "auto":
            stack.enter_context(_watch_calls(model))
        try:
            PACKED.excluded = positions == "consecutive"
            for config in configs:
                config._attn_implementation_internal = PCP
            logger.debug("%s: %d configurations switched to %r", type(model).__name__, len(configs), PCP)
            yield
        finally:
            PACKED.excluded = excluded
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation_internal = implementation


def configs_of(model: torch.nn.Module) -> list[Any]:
    """Every configuration that some part of the model reads: parts may hold copies, which no setter reaches."""
    found: dict[int, Any] = {}

    def add(config: Any) -> None:
        if not isinstance(config, PreTrainedConfig) or id(config) in found:
            return
        found[id(config)] = config
        for name in config.sub_configs:
            add(getattr(config, name, None))

    for module in model.modules():
        add(getattr(module, "config", None))
    return list(found.values())


@contextmanager
def _watch_calls(model: torch.nn.Module) -> Iterator[None]:
    """Exclude packed sequences during calls of ``model`` that leave ``position_ids`` to it."""
    parameters = list(inspect.signature(model.forward).parameters)
    place = parameters.index("position_ids") if "position_ids" in parameters else None

    def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("position_ids")
        if given is None and place is not None and len(args) > place:
            given = args[place]
        PACKED.excluded = given is None

    def leave(module: torch.nn.Module, args: tuple[Any, ...], result: Any) -> None:
        PACKED.excluded = False

    hooks: list[Callable[[], None]] = [
        model.register_forward_pre_hook(enter, with_kwargs=True).remove,
        model.register_forward_hook(leave, always_call=True).remove,
    ]
    try:
        yield
    finally:
        for remove in hooks:
            remove()
