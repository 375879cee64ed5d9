# SPDX-License-Identifier: Apache-2.0
"""What a user may ask for, checked before anything is captured.

An option is accepted only when its behaviour exists; every other key or value is an error that names
the accepted set, so that a typo or a wish never turns into a silent default.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal

from pcp_passes.errors import ConfigError

Mode = Literal["off", "check", "rewrite"]
Layout = Literal["zigzag", "contiguous"]
Decode = Literal["replicate", "owner"]
Verify = Literal["off", "final", "every"]
Drafter = Literal["auto", "shard", "replicate"]
ShareTopk = Literal["off", "owner"]
VerifyTokens = Literal["identical", "broadcast"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "mode": ("off", "check", "rewrite"),
    "layout": ("zigzag", "contiguous"),
    "decode": ("replicate", "owner"),
    "verify": ("off", "final", "every"),
    "drafter": ("auto", "shard", "replicate"),
    "share_topk": ("off", "owner"),
    "verify_tokens": ("identical", "broadcast"),
}

#: Below 4 s a loaded machine looks frozen; above 60 s nobody is told in time.
_SECONDS: dict[str, tuple[float, float]] = {"silence_s": (4, 60), "agreement_s": (1, 3600)}

#: Values that exist elsewhere in the package, or are planned, and why they are not accepted here.
_WHY_NOT: dict[tuple[str, str], str] = {
    ("layout", "interleave"): (
        "interleave makes every token an attention row of its own, which a paged back end cannot batch; "
        "it is available to the planner (`pcp plan`) only"
    ),
}


@dataclass(frozen=True)
class GatherOptions:
    """How new cache rows travel. ``pack``: the tensors of one cache write share one collective."""

    pack: bool = True


@dataclass(frozen=True)
class PcpOptions:
    """Options of the vLLM front end: the value of ``additional_config["pcp_passes"]``.

    Attributes:
        mode: ``rewrite`` runs sharded; ``check`` captures, rewrites a copy and verifies it, then runs vLLM
            as if the plugin were absent; ``off`` does nothing.
        layout: how a prefill's tokens are dealt to the ranks.
        decode: ``replicate`` runs decodes on every rank (a pure decode step has no collective);
            ``owner`` gives each decode to one rank.
        gather: see :class:`GatherOptions`.
        drafter: whether the first pass of a next-token drafter is sharded as its target is (``shard``, and ``auto``
            where the drafter can be), or runs on every rank (``replicate``). A block drafter is always replicated.
        share_topk: with ``owner``, draft steps after the first use again the key selection that the owner of a
            request's last token made (sparse attention).
        verify_tokens: ``identical`` relies on all ranks sampling the same tokens from the same restored rows;
            ``broadcast`` takes PCP rank 0's.
        acceptance_floor: share of drafts accepted, 0 to 1, under which a warning is logged; ``None``: never.
        verify: run the graph invariants after the last pass (``final``), after each (``every``), or never.
        poison: fill the rows of restored states that are not sampled with NaN, so that a stray read shows.
        dump: folder for numbered graph dumps; ``None`` writes nothing.
        ranks: with ``mode="check"``, the group size to check for; by default that of the running group, at least 2.
        silence_s: seconds without a heartbeat after which a rank counts as lost, 4 to 60. vLLM then needs up to 10 s
            to end its processes.
        agreement_s: seconds to wait for the other ranks' options and graphs.
    """

    mode: Mode = "rewrite"
    layout: Layout = "zigzag"
    decode: Decode = "replicate"
    gather: GatherOptions = field(default_factory=GatherOptions)
    drafter: Drafter = "auto"
    share_topk: ShareTopk = "off"
    verify_tokens: VerifyTokens = "identical"
    acceptance_floor: float | None = None
    verify: Verify = "final"
    poison: bool = False
    dump: str | None = None
    ranks: int | None = None
    silence_s: float = 12.0
    agreement_s: float = 60.0

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> PcpOptions:
        """Build options from plain JSON data.

        Raises:
            ConfigError: on an unknown key, or a value outside the accepted set.
        """
        if not isinstance(raw, Mapping):
            raise ConfigError(f'pcp_passes must be a mapping of options, found {raw!r}; write {{"mode": "rewrite"}}.')
        known = {f.name: f for f in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in raw.items():
            if key not in known:
                raise ConfigError(unknown_choice("option", key, sorted(known)))
            values[key] = _checked(key, value)
        return cls(**values)

    def digest(self) -> str:
        """A stable hash of every option; part of compile-cache keys and of the start-up agreement."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def _checked(key: str, value: Any) -> Any:
    if key in _CHOICES:
        if value not in _CHOICES[key]:
            why = _WHY_NOT.get((key, str(value)))
            raise ConfigError(unknown_choice(f"pcp_passes.{key}", value, _CHOICES[key]) + (f" ({why}.)" if why else ""))
        return value
    if key == "gather":
        return _gather(value)
    if key == "acceptance_floor":
        return _share(key, value)
    if key == "poison":
        return _typed(key, value, bool, "true or false")
    if key == "dump":
        return value if value is None else _typed(key, value, str, "a folder name or null")
    if key == "ranks":
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 2):
            raise ConfigError(f"pcp_passes.ranks must be an integer of at least 2, or null, found {value!r}.")
        return value
    return _seconds(key, value, *_SECONDS[key])


def _seconds(key: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ConfigError(f"pcp_passes.{key} must be a number of seconds from {low:g} to {high:g}, found {value!r}.")
    return float(value)


def _share(key: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigError(f"pcp_passes.{key} must be a share from 0 to 1, or null, found {value!r}.")
    return float(value)


def _gather(value: Any) -> GatherOptions:
    if isinstance(value, GatherOptions):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f'pcp_passes.gather must be a mapping such as {{"pack": true}}, found {value!r}.')
    for key in value:
        if key != "pack":
            raise ConfigError(unknown_choice("pcp_passes.gather key", key, ("pack",)))
    return GatherOptions(pack=_typed("gather.pack", value.get("pack", True), bool, "true or false"))


def _typed(key: str, value: Any, kind: type, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(f"pcp_passes.{key} must be {wanted}, found {value!r}.")
    return value


def unknown_choice(what: str, found: object, accepted: Sequence[str]) -> str:
    """The sentence for a value outside the accepted ones, with the nearest of them."""
    near = get_close_matches(str(found), accepted, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {found!r}; accepted: {', '.join(map(repr, accepted))}.{hint}"
