# SPDX-License-Identifier: Apache-2.0
"""Every option is accepted with the values that exist, and everything else is an error that says what is accepted."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from typing import Any, get_args

import pytest

from pcp_passes import options
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.options import GatherOptions, PcpOptions

ACCEPTED: dict[str, tuple[Any, ...]] = {
    "mode": ("off", "check", "rewrite"),
    "layout": ("zigzag", "contiguous"),
    "decode": ("replicate", "owner"),
    "verify": ("off", "final", "every"),
    "poison": (True, False),
    "dump": (None, "some/folder"),
    "ranks": (None, 2, 64),
    "silence_s": (4, 60.0),
    "agreement_s": (1, 300.0),
    "gather": ({}, {"pack": False}, GatherOptions(pack=False)),
    "drafter": ("auto", "shard", "replicate"),
    "share_topk": ("off", "owner"),
    "verify_tokens": ("identical", "broadcast"),
    "acceptance_floor": (None, 0, 0.35, 1),
}

REFUSED: list[tuple[str, Any, tuple[str, ...]]] = [
    ("mode", "rewite", ("unknown pcp_passes.mode 'rewite'", "'off', 'check', 'rewrite'", "Did you mean 'rewrite'?")),
    ("mode", None, ("unknown pcp_passes.mode None", "'rewrite'")),
    ("mode", ["rewrite"], ("unknown pcp_passes.mode ['rewrite']",)),
    ("layout", "zig-zag", ("Did you mean 'zigzag'?",)),
    ("layout", "interleave", ("'interleave'", "'zigzag', 'contiguous'", "cannot batch", "`pcp plan`")),
    ("decode", 1, ("unknown pcp_passes.decode 1", "'replicate', 'owner'")),
    ("verify", True, ("unknown pcp_passes.verify True",)),
    ("poison", 1, ("pcp_passes.poison must be true or false, found 1",)),
    ("poison", "true", ("pcp_passes.poison must be true or false, found 'true'",)),
    ("dump", 3, ("pcp_passes.dump must be a folder name or null, found 3",)),
    ("ranks", 1, ("pcp_passes.ranks must be an integer of at least 2, or null, found 1",)),
    ("ranks", 2.0, ("found 2.0",)),
    ("ranks", True, ("found True",)),
    ("silence_s", 0, ("pcp_passes.silence_s must be a number of seconds from 4 to 60, found 0",)),
    ("silence_s", "20", ("found '20'",)),
    ("agreement_s", -1.0, ("found -1.0",)),
    ("agreement_s", True, ("found True",)),
    ("gather", True, ('pcp_passes.gather must be a mapping such as {"pack": true}, found True',)),
    ("gather", {"pakc": True}, ("unknown pcp_passes.gather key 'pakc'", "Did you mean 'pack'?")),
    ("drafter", "sharded", ("unknown pcp_passes.drafter 'sharded'", "'auto', 'shard', 'replicate'", "mean 'shard'?")),
    ("share_topk", "all", ("unknown pcp_passes.share_topk 'all'", "'off', 'owner'")),
    ("verify_tokens", "same", ("unknown pcp_passes.verify_tokens 'same'", "'identical', 'broadcast'")),
    ("acceptance_floor", 50, ("pcp_passes.acceptance_floor must be a share from 0 to 1, or null, found 50",)),
    ("acceptance_floor", True, ("found True",)),
    ("gather", {"pack": "yes"}, ("pcp_passes.gather.pack must be true or false, found 'yes'",)),
]


def test_every_option_is_tested() -> None:
    names = {f.name for f in fields(PcpOptions)}
    assert set(ACCEPTED) == names
    assert {key for key, _, _ in REFUSED} == names


@pytest.mark.parametrize("key, value", [(key, value) for key, values in ACCEPTED.items() for value in values])
def test_accepted(key: str, value: Any) -> None:
    found = getattr(PcpOptions.parse({key: value}), key)
    wanted = GatherOptions(**value) if isinstance(value, dict) else value
    assert found == wanted
    assert isinstance(found, float) or type(found) is type(wanted)


@pytest.mark.parametrize("key, value, fragments", REFUSED)
def test_refused(key: str, value: Any, fragments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        PcpOptions.parse({key: value})
    assert "\n" not in str(refused.value)
    for fragment in fragments:
        assert fragment in str(refused.value)


def test_choices_are_those_of_the_types() -> None:
    for name, choices in options._CHOICES.items():
        assert choices == get_args(getattr(options, name.title().replace("_", "")))


def test_unknown_key_names_all_options_and_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option 'layuot'; accepted: .*\. Did you mean 'layout'\?$"
    ) as refused:
        PcpOptions.parse({"mode": "check", "layuot": "zigzag"})
    assert all(repr(f.name) in str(refused.value) for f in fields(PcpOptions))
    with pytest.raises(ConfigError) as strange:
        PcpOptions.parse({7: "zigzag"})  # type: ignore[dict-item]
    assert "unknown option 7" in str(strange.value) and "Did you mean" not in str(strange.value)


@pytest.mark.parametrize("raw", ["rewrite", None, True, ["mode"]])
def test_anything_but_a_mapping_is_refused(raw: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a mapping of options, found .*; write \{\"mode\": \"rewrite\"\}"):
        PcpOptions.parse(raw)


def test_errors_are_ours_and_value_errors() -> None:
    assert issubclass(ConfigError, PcpError) and issubclass(ConfigError, ValueError)


def test_defaults_and_immutability() -> None:
    parsed = PcpOptions.parse({})
    assert parsed == PcpOptions() and parsed.mode == "rewrite"
    with pytest.raises(FrozenInstanceError):
        parsed.mode = "off"  # type: ignore[misc]


def test_digest_is_stable_and_sees_every_option() -> None:
    """Compile caches and the start-up agreement are keyed by it."""
    base = PcpOptions()
    assert base.digest() == PcpOptions.parse({"mode": "rewrite"}).digest()
    changed = {
        "mode": "check",
        "layout": "contiguous",
        "decode": "owner",
        "gather": GatherOptions(pack=False),
        "verify": "off",
        "poison": True,
        "dump": "x",
        "ranks": 2,
        "silence_s": 5.0,
        "agreement_s": 5.0,
        "drafter": "replicate",
        "share_topk": "owner",
        "verify_tokens": "broadcast",
        "acceptance_floor": 0.5,
    }
    assert set(changed) == {f.name for f in fields(PcpOptions)}
    digests = {replace(base, **{name: value}).digest() for name, value in changed.items()}
    assert len(digests | {base.digest()}) == len(changed) + 1
