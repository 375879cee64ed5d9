# SPDX-License-Identifier: Apache-2.0
"""What cannot run is refused when the engine is built, in one sentence with the values found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.errors import ConfigError
from tests.engine_double import ArithmeticExecutor


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("graph_mode", "full", "graph_mode='full' .* one graph, but no graph holds .*; use 'full_and_piecewise'"),
        ("graph_mode", "piecewize", "Did you mean 'piecewise'"),
        ("graph_rows", (8, 16), "graph_rows given, but graph_mode='none' has no graphs; set graph_mode to one of"),
        ("fast_prefill", True, "fast_prefill=True.*set fast_prefill=False"),
        ("layout", "interleave", "unknown layout 'interleave'; accepted: 'zigzag', 'contiguous'"),
        ("layout", "zigzagg", "Did you mean 'zigzag'"),
        ("decode", "owned", "unknown decode 'owned'"),
        ("block_size", 0, "block_size must be an integer of at least 1, found 0"),
        ("pcp", True, "pcp must be an integer"),
        ("long_prefill_threshold", -1, "at least 0, found -1"),
        ("silence_s", 60.0, "4 to 25 seconds"),
        ("silence_s", None, "4 to 25 seconds.*found None"),
        ("expert_parallel", "no", "expert_parallel must be True or False, found 'no'"),
        ("fold_on_tp", 1, "fold_on_tp must be True or False, found 1"),
        ("prefix_cache", "off", "prefix_cache must be True or False"),
        ("check_ranks", 0, "check_ranks must be True or False"),
        ("long_prefill_threshold", "16", "long_prefill_threshold must be an integer, a number of tokens, found '16'"),
        ("workspace_bytes", 1e9, "workspace_bytes must be an integer, a number of bytes, found 1000000000.0"),
        ("workspace_bytes", "256M", "workspace_bytes must be an integer, a number of bytes, found '256M'"),
        ("workspace_bytes", True, "workspace_bytes must be an integer"),
        ("workspace_bytes", 1 << 20, "workspace_bytes must be at least 64 MiB"),
        ("sparse_attention", "flash", "unknown sparse_attention .flash.*accepted: .auto., .flashmla., .triton., .ref"),
    ],
)
def test_an_option_that_cannot_run_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineOptions(**{field: value})


def test_sizes_are_checked_with_the_drafter() -> None:
    options = EngineOptions(max_len=100, block_size=16, num_blocks=7)
    ArithmeticExecutor(options, 3)
    Engine(ArithmeticExecutor(options, 4))
    with pytest.raises(ConfigError, match=r"num_blocks=7 cannot hold one request of max_len=100 with 5 drafts.* 8 "):
        Engine(ArithmeticExecutor(options, 5))
    with pytest.raises(ConfigError, match="drafts 9 tokens a step; at most 8"):
        Engine(ArithmeticExecutor(EngineOptions(), 9))
    with pytest.raises(ConfigError, match="budget=3 is below the 4 tokens"):
        Engine(ArithmeticExecutor(EngineOptions(budget=3), 3))


@pytest.mark.parametrize("wrong", [{"max_tokens": 0}, {"temperature": -0.5}, {"temperature": float("nan")}])
def test_sampling_parameters(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_requests_that_can_never_run_are_refused() -> None:
    engine = Engine(ArithmeticExecutor(EngineOptions(max_len=20), 0))
    with pytest.raises(ConfigError, match="18 prompt tokens and max_tokens=3 exceed max_len=20"):
        engine.add_request([1] * 18, SamplingParams(max_tokens=3))
    with pytest.raises(ConfigError, match="empty prompt"):
        engine.add_request([])
    engine.add_request([1], request_id="a")
    with pytest.raises(ConfigError, match="request id 'a' is in use"):
        engine.add_request([2], request_id="a")
    with pytest.raises(ConfigError, match="no unfinished request 'b'; unfinished: \\['a'\\]"):
        engine.abort("b")


def test_every_option_is_part_of_the_agreement() -> None:
    base = EngineOptions()
    other: dict[str, Any] = {
        "layout": "contiguous",
        "cache_dtype": "fp8",
        "sparse_attention": "reference",
        "decode": "owner",
        "prefix_cache": False,
        "acceptance_floor": 0.5,
        "check_ranks": False,
        "expert_parallel": True,
    }
    for field in dataclasses.fields(EngineOptions):
        if field.name == "fast_prefill":
            continue  # one accepted value
        if field.name.startswith("graph"):
            continue  # below
        if field.name in ("tp", "fold_on_tp"):
            continue  # below
        value = other.get(field.name, getattr(base, field.name) + 1 if field.name not in other else None)
        assert dataclasses.replace(base, **{field.name: value}).digest() != base.digest(), field.name
    two = dataclasses.replace(base, pcp=2)
    assert dataclasses.replace(two, tp=2, fold_on_tp=True).digest() != two.digest()
    graphed = dataclasses.replace(base, graph_mode="piecewise")
    assert graphed.digest() != base.digest()
    graphs: dict[str, Any] = {
        "graph_mode": "full_and_piecewise",
        "graph_compile": "inductor",
        "graph_rows": (8, 16),
        "graph_requests": (4,),
        "graph_collectives": "inside",
        "graph_bytes": 1 << 20,
    }
    assert set(graphs) == {field.name for field in dataclasses.fields(EngineOptions) if field.name.startswith("graph")}
    for name, value in graphs.items():
        assert dataclasses.replace(graphed, **{name: value}).digest() != graphed.digest(), name


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("graph_compile", "aot", "unknown graph_compile 'aot'; accepted: 'eager', 'inductor'"),
        ("graph_collectives", "within", "unknown graph_collectives 'within'"),
        ("graph_rows", (8, 4), r"^graph_rows: .*rows .*\(8, 4\)"),
        ("graph_rows", (0, 4), r"^graph_rows: .*rows .*\(0, 4\)"),
        ("graph_rows", 0, r"^graph_rows: .* tuple of integers; found 0\."),
        ("graph_requests", "", r"^graph_requests: .* tuple of integers; found ''\."),
        ("graph_requests", (2, 2), r"^graph_requests: .*requests .*\(2, 2\)"),
        ("graph_requests", (1.5,), r"^graph_requests: .*requests .*1\.5"),
        ("graph_bytes", 0, "graph_bytes must be an integer of at least 1, found 0"),
    ],
)
def test_what_graphs_cannot_be_is_refused(field: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineOptions(graph_mode="piecewise", **{field: value})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"dp": 0}, "dp must be an integer of at least 1"),
        ({"pp": 1.5}, "pp must be an integer of at least 1"),
        ({"tp": 2}, "set fold_on_tp=True"),
        ({"tp": 4, "pcp": 2, "fold_on_tp": True}, "fold_on_tp"),
        ({"expert_parallel": True, "graph_mode": "piecewise"}, "drop expert_parallel"),
        ({"pp": 2, "graph_mode": "full_and_piecewise"}, "or pp=1"),
    ],
)
def test_meshes_that_cannot_run_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineOptions(**given)


def test_the_mesh_of_an_engine() -> None:
    whole = EngineOptions(dp=2, pp=3, pcp=2, expert_parallel=True)
    assert whole.mesh.world_size == 12 and whole.mesh.ep == 4 and whole.lockstep
    assert not EngineOptions(dp=2).lockstep and not EngineOptions(pcp=2, expert_parallel=True).lockstep
    folded = EngineOptions(pcp=2, tp=2, fold_on_tp=True)
    assert folded.mesh.world_size == 2, "no device is added"
