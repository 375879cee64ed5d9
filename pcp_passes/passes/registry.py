# SPDX-License-Identifier: Apache-2.0
"""Passes and pipelines by name, for the command line: ``place-rows,gather-cache-writes`` or ``sharded``.

An option of a pass follows its name: ``name:key=value:other=value``; keys and types are those of the pass's fields, and
the members of a tuple are joined by ``+``.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pcp_passes.errors import ConfigError
from pcp_passes.passes import REPLICATED, SHARDED, SHARDED_UNPACKED
from pcp_passes.passes.base import Pass
from pcp_passes.passes.bodies.dispatch_experts import DispatchExperts
from pcp_passes.passes.bodies.lower_index_prologue import LowerIndexPrologue
from pcp_passes.passes.bodies.lower_sparse_index import LowerSparseIndex
from pcp_passes.passes.bodies.pack_records import PackRecords
from pcp_passes.passes.bodies.split_piecewise import SplitPiecewise
from pcp_passes.passes.bodies.split_stages import SplitStages
from pcp_passes.passes.steps.keep_stage import KeepStage
from pcp_passes.passes.steps.pipeline import STEP
from pcp_passes.passes.tokens.pipeline import TokenOptions, token_pipeline

PIPELINES: dict[str, tuple[Pass, ...]] = {
    "sharded": SHARDED,
    "sharded-unpacked": SHARDED_UNPACKED,
    "replicated": REPLICATED,
    "tokens": token_pipeline(TokenOptions()).passes,
    "step": STEP,
}
"""Every pipeline that may be asked for by name."""

_ALONE: tuple[type[Any], ...] = (
    LowerSparseIndex, PackRecords, LowerIndexPrologue, DispatchExperts, SplitStages, KeepStage, SplitPiecewise,
)  # fmt: skip
"""Passes that no pipeline above runs by default."""


def pass_registry(passes: Iterable[type[Any]] | None = None) -> dict[str, type[Any]]:
    """Pass classes by the name of the pass: by default those of every pipeline, and those that stand alone."""
    in_pipelines = dict.fromkeys(type(step) for steps in PIPELINES.values() for step in steps)
    found: dict[str, type[Any]] = {}
    for cls in (*in_pipelines, *_ALONE) if passes is None else passes:
        assert cls.name not in found, f"two passes are called {cls.name}"
        found[cls.name] = cls
    return found


def parse_passes(text: str, registry: Mapping[str, type[Any]] | None = None) -> tuple[Pass, ...]:
    """The passes of a comma list, or of a pipeline's name.

    Args:
        text: such as ``sharded`` or ``place-rows,gather-cache-writes``.
        registry: pass classes by name; by default every pass of the package.

    Raises:
        ConfigError: a pass, option or value is unknown; lists what there is.
    """
    known = pass_registry() if registry is None else registry
    if text.strip() in PIPELINES:
        return PIPELINES[text.strip()]
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise ConfigError(f"found no pass in {text!r}; required a comma list of {', '.join(known)}")
    return tuple(_one(part, known) for part in names)


def _one(text: str, known: Mapping[str, type[Any]]) -> Pass:
    name, *options = text.split(":")
    if name not in known:
        accepted = [*known, *PIPELINES]
        near = get_close_matches(name, accepted, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"unknown pass {name!r}; there are {', '.join(known)}; pipelines: {', '.join(PIPELINES)}.{hint}"
        )
    cls = known[name]
    kinds = get_type_hints(cls)
    accepted = [field.name for field in fields(cls)]
    values: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or key not in accepted:
            raise ConfigError(f"{name} has no option {option!r}; its options are {', '.join(accepted) or 'none'}")
        values[key] = _value(f"{name}:{key}", value, kinds[key])
    made: Pass = cls(**values)
    return made


_TRUTH = {"true": True, "false": False}


def _value(what: str, text: str, kind: Any) -> Any:
    """A value of a field's type: bool, int, float, str, a ``Literal`` of those, a tuple, or one of them or ``None``."""
    if get_origin(kind) is tuple and get_args(kind)[1:] == (Ellipsis,):
        return tuple(_value(what, part, get_args(kind)[0]) for part in text.split("+") if part)
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType, Literal) else (kind,)
    if get_origin(kind) is Literal:
        for choice in choices:
            if str(choice) == text:
                return choice
        raise ConfigError(f"{what} is {text!r}; required one of {', '.join(map(str, choices))}")
    for choice in choices:
        if choice is type(None) and text == "none":
            return None
        if get_origin(choice) is Literal:
            return _value(what, text, choice)
        if choice is bool and text in _TRUTH:
            return _TRUTH[text]
        if choice is str:
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                continue
    wanted = " or ".join(getattr(choice, "__name__", str(choice)).replace("NoneType", "none") for choice in choices)
    raise ConfigError(f"{what} is {text!r}; required a {wanted}")
