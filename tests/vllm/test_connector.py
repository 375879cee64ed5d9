# SPDX-License-Identifier: Apache-2.0
"""A KV producer with drafts on two ranks: nothing is published before the drafter's rows are there, and what is
published equals what stock vLLM publishes on one rank."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pcp_passes.frontends.vllm.session import Group, Request, Result, Session, run
from tests.models import build, prompt

RECORDING = "tests.vllm.recording"
STEPS = 2
LENGTHS = (100, 37, 70)
#: The engine that the faults are in publishes other prompts afterwards.
FAULTY = (90, 41)


def _rpc(*functions: str) -> tuple[str, ...]:
    return tuple(f"{RECORDING}:{name}" for name in functions)


def _prompts(lengths: tuple[int, ...]) -> tuple[Request, ...]:
    return tuple(Request(prompt(n, seed=80), 6) for n in lengths)


def _session(pcp: int, storage: Path, groups: tuple[Group, ...], connector: dict[str, Any]) -> Session:
    return Session(
        model=str(build("tiny_mla_mtp")),
        groups=groups,
        pcp=pcp,
        options={} if pcp > 1 else None,
        backend="eager",
        engine={
            "max_model_len": 256,
            "max_num_batched_tokens": 512,
            "enable_prefix_caching": False,
            "speculative_config": {"method": "mtp", "num_speculative_tokens": STEPS},
            "kv_transfer_config": {
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(storage)},
                **connector,
            },
        },
        env={"VLLM_DISABLE_COMPILE_CACHE": "1"},
    )


@functools.cache
def stock() -> tuple[Result, Path]:
    """One rank, vLLM's own connector, without us."""
    storage = Path(tempfile.mkdtemp(prefix="pcp-kv-stock-"))
    groups = (Group(_prompts(LENGTHS)), Group(_prompts(FAULTY)))
    return run(_session(1, storage, groups, {"kv_connector": "ExampleConnector"}), timeout_s=420), storage


@functools.cache
def two_ranks() -> tuple[Result, Path]:
    """Two ranks with a connector that takes notes; the first prompts once more; then the fault."""
    storage = Path(tempfile.mkdtemp(prefix="pcp-kv-ours-"))
    groups = (
        Group(_prompts(LENGTHS)),
        Group(_prompts(LENGTHS), _rpc("layers", "seen")),
        Group(_prompts(FAULTY), _rpc("seen", "clear_drafter_cache", "publish_at_once")),
        Group(rpc=_rpc("seen")),
    )
    connector = {"kv_connector": "RecordingConnector", "kv_connector_module_path": RECORDING}
    return run(_session(2, storage, groups, connector), timeout_s=420), storage


def test_nothing_is_published_before_the_drafter_wrote() -> None:
    layers, seen = two_ranks()[0].rpc[1]
    first, second = seen
    assert [note["layer"] for note in first] == layers[0]
    for note in first:
        assert not note["in_forward"]
        assert len(note["lengths"]) == len(LENGTHS)
        assert note["missing"] == [0] * len(LENGTHS)
    assert second == [], "the cache is the same on every rank, and rank 0 publishes it"


def test_publishing_at_once_would_be_seen() -> None:
    notes, _ = two_ranks()[0].rpc[3][0]
    target = [note for note in notes if note["in_forward"]]
    assert target
    assert target[0]["missing"] == target[0]["lengths"], "the target's first layer, before any drafter row"


def test_what_is_published_equals_one_rank() -> None:
    (_, ours), (_, theirs) = two_ranks(), stock()
    wanted = {path.relative_to(theirs): load_file(path)["kv_cache"] for path in theirs.rglob("*.safetensors")}
    found = {path.relative_to(ours): load_file(path)["kv_cache"] for path in ours.rglob("*.safetensors")}
    assert len({path.parent for path in wanted}) == len(LENGTHS) + len(FAULTY)
    assert found.keys() == wanted.keys()
    for path, rows in wanted.items():
        assert found[path].shape == rows.shape
        assert (found[path] - rows).abs().max() < 1e-4, path


@pytest.mark.parametrize("again", [0, 1])
def test_tokens_equal_one_rank(again: int) -> None:
    """The second time, vLLM's connector finds the prompts in the store, and loads them on every rank."""
    ours, theirs = two_ranks()[0].outputs[again], stock()[0].outputs[0]
    assert [o.tokens for o in ours if o] == [o.tokens for o in theirs if o]


def test_the_second_time_nothing_is_stored() -> None:
    assert two_ranks()[0].rpc[2][0] == [[], []]
