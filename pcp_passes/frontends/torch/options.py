# SPDX-License-Identifier: Apache-2.0
"""Options of the PyTorch front end, checked before anything is captured."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from pcp_passes.errors import ConfigError
from pcp_passes.options import Layout, Verify, unknown_choice
from pcp_passes.passes.tokens.pipeline import Outputs
from pcp_passes.passes.tokens.propagate_placements import Unknown

Inner = Literal["inductor", "eager"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "layout": get_args(Layout),
    "outputs": get_args(Outputs),
    "inner": get_args(Inner),
    "unknown": get_args(Unknown),
    "verify": get_args(Verify),
}


@dataclass(frozen=True)
class TorchOptions:
    """What a user may ask of ``torch.compile(backend="pcp")`` and of the decorator.

    Attributes:
        layout: how tokens are dealt to the ranks.
        outputs: ``global``: every rank returns all tokens in global order; ``local``: each rank returns its own rows;
            ``last``: every rank returns the row of the last token only.
        inner: what runs the rewritten graph.
        unknown: what becomes of an op whose treatment of tokens cannot be known, and of a graph without a token
            dimension: refuse it, or run it replicated on all ranks.
        tokens: argument name to token dimension; empty when only one size of the graph is dynamic.
        replicate: dotted paths of modules that every rank runs on all tokens.
        balance: operations that one byte of a gather is worth, when a gather can be saved by computing more on each
            rank; ``None`` takes what suits the device.
        verify: check the graph invariants after the last pass (``final``), after each (``every``), or never.
        dump: folder for numbered graph dumps; ``None`` writes nothing.
        group: a process group, a one-dimensional device mesh, or a group's name; ``None`` is the default group.
        axis: name of the axis in graphs; ``None`` gives each group a name of its own.
        agreement_s: seconds to wait for the other ranks' graphs.
    """

    layout: Layout = "zigzag"
    outputs: Outputs = "global"
    inner: Inner = "inductor"
    unknown: Unknown = "refuse"
    tokens: Mapping[str, int] = field(default_factory=dict)
    replicate: tuple[str, ...] = ()
    balance: float | None = None
    verify: Verify = "final"
    dump: str | None = None
    group: Any = field(default=None, compare=False)
    axis: str | None = None
    agreement_s: float = 60.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any] | None) -> TorchOptions:
        """Build options from keyword arguments or the ``options`` of ``torch.compile``.

        Raises:
            ConfigError: on an unknown key, or a value outside the accepted set.
        """
        known = [f.name for f in fields(cls)]
        for key in raw or {}:
            if key not in known:
                raise ConfigError(unknown_choice("option", key, known))
        return cls(**{key: _checked(key, value) for key, value in (raw or {}).items()})

    def digest(self) -> str:
        """A stable hash of what must be equal on all ranks; the group and the dump folder are a rank's own."""
        plain = asdict(replace(self, group=None, dump=None))
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _checked(key: str, value: Any) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            raise ConfigError(unknown_choice(key, value, _CHOICES[key]))
        return value
    if key == "tokens":
        return _tokens(value)
    if key == "replicate":
        return _paths(value)
    if key in ("dump", "axis"):
        if value is not None and (not isinstance(value, str) or not value):
            raise ConfigError(f"{key} must be a name or None, found {value!r}.")
        return value
    if key == "agreement_s":
        if not _is_number(value) or not 1 <= value <= 3600:
            raise ConfigError(f"agreement_s must be a number of seconds from 1 to 3600, found {value!r}.")
        return float(value)
    if key == "balance":
        if value is not None and (not _is_number(value) or not 0 < value < float("inf")):
            raise ConfigError(f"balance must be a number of operations per byte above 0, or None, found {value!r}.")
        return value if value is None else float(value)
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _tokens(value: Any) -> dict[str, int]:
    if not isinstance(value, Mapping):
        raise ConfigError(f'tokens must map argument names to dimensions, as in {{"input_ids": 1}}, found {value!r}.')
    for name, dim in value.items():
        if not isinstance(name, str) or isinstance(dim, bool) or not isinstance(dim, int):
            raise ConfigError(f"tokens must map argument names to dimensions, found {name!r}: {dim!r}.")
    return dict(value)


def _paths(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(path, str) for path in value):
        raise ConfigError(f'replicate must list module paths, as in ["model.layers.0.mlp"], found {value!r}.')
    return tuple(value)
