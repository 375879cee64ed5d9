# SPDX-License-Identifier: Apache-2.0
"""Piecewise CUDA graphs in vLLM: which modes and sizes run with PCP. vLLM is not needed for them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import config_graphs
from pcp_passes.layout import Batch, build_layout, dispatch_tokens
from pcp_passes.piecewise.buckets import derive_buckets
from tests.vllm_graph_doubles import Mode, Vllm, configuration


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


def test_most_rows_are_those_of_a_rank() -> None:
    """Three decoding requests, and a prompt that takes the rest of the budget."""
    assert config_graphs.most_rows(configuration()) == 3 + 31
    assert config_graphs.most_rows(configuration(drafts=2)) == 9 + 28
    assert config_graphs.most_rows(configuration(requests=100)) == 64
    none = np.zeros(4, dtype=np.int32)
    batch = Batch(np.array([1, 1, 1, 61], dtype=np.int32), none, none, is_prefilling=np.array([False] * 3 + [True]))
    assert dispatch_tokens(batch, 2) == 34


@pytest.mark.parametrize(("budget", "requests", "drafts"), [(9, 3, 1), (5, 3, 2), (4, 4, 0), (2, 3, 0)])
def test_no_replicated_step_is_above_the_bound(budget: int, requests: int, drafts: int) -> None:
    """Every batch of that many requests that the budget holds, decoding or not."""
    most = config_graphs.most_replicated_rows(configuration(budget=budget, requests=requests, drafts=drafts))
    replicated = set()
    for count in range(1, requests + 1):
        for prefilling in itertools.product([False, True], repeat=count):
            tokens = [range(1, (budget if prefill else 1 + drafts) + 1) for prefill in prefilling]
            for scheduled in itertools.product(*tokens):
                none = np.zeros(count, dtype=np.int32)
                given = Batch(np.array(scheduled, dtype=np.int32), none, none, is_prefilling=np.array(prefilling))
                if sum(scheduled) <= budget and build_layout(given, 2).is_replicated:
                    replicated.add(dispatch_tokens(given, 2))
    assert max(replicated) == most
    sizes = [1, 2, most - 1, most, most + 3, most + 9]
    kept = config_graphs.up_to(sizes, most)
    for rows in replicated:
        assert min(size for size in sizes if size >= rows) in kept, "what vLLM dispatches to was captured"
    assert set(kept) < set(sizes)


@pytest.mark.parametrize("mode", [mode for mode in Mode if mode not in (Mode.NONE, Mode.PIECEWISE)])
def test_whole_graphs_are_refused(mode: Mode) -> None:
    said = config_graphs.graph_mode(configuration(mode=mode))
    assert said is not None and said.startswith(f"cudagraph_mode={mode.name} ") and "set it to PIECEWISE" in said


def test_pieces_and_no_graphs_are_accepted() -> None:
    assert config_graphs.graph_mode(configuration()) is None
    assert config_graphs.graph_mode(configuration(mode=Mode.NONE)) is None
    assert config_graphs.graph_mode(configuration(cudagraph_mode=None)) is None


@pytest.mark.parametrize("mode", [Mode.PIECEWISE, Mode.NONE])
def test_a_block_drafter_runs_without_graphs(mode: Mode) -> None:
    config = configuration(drafts=2, mode=mode)
    assert config_graphs.graph_drafter(config) is None
    config.speculative_config.method = "dspark"
    said = config_graphs.graph_drafter(config)
    assert (said is None) if mode is Mode.NONE else (said is not None and "'dspark'" in said and "to NONE" in said)


def test_compiled_sizes_above_any_step_are_named() -> None:
    assert config_graphs.compiled_sizes(configuration(compile_sizes=[34, 8])) is None
    said = config_graphs.compiled_sizes(configuration(compile_sizes=[34, 35, 64]))
    assert said is not None and "compile_sizes=[35, 64]" in said and "at most 34" in said


def test_sizes_that_no_step_needs_are_not_captured() -> None:
    config = configuration(cudagraph_capture_sizes=[64, 8, 32, 40, 48], compile_sizes=[8, 48])
    config_graphs.settle_sizes(config, asked=True)
    compilation = config.compilation_config
    assert compilation.cudagraph_capture_sizes == [8, 32, 40], "34 rows are padded to 40"
    assert compilation.max_cudagraph_capture_size == 40
    assert compilation.compile_sizes == [8]


@pytest.mark.parametrize("sizes", [[1, 2, 34], [64], [8]])
def test_sizes_that_a_step_may_need_are_kept(sizes: list[int]) -> None:
    config = configuration(cudagraph_capture_sizes=list(sizes))
    config_graphs.settle_sizes(config, asked=True)
    assert config.compilation_config.cudagraph_capture_sizes == sizes


@pytest.mark.parametrize("requests", [4, 100])
def test_sizes_that_nobody_asked_for_are_buckets_of_a_ranks_rows(requests: int) -> None:
    config = configuration(
        budget=2046, requests=requests, pcp=4, cudagraph_capture_sizes=[1, 512], compile_sizes=[1, 512, 100]
    )
    config_graphs.settle_sizes(config, asked=False)
    compilation, most = config.compilation_config, config_graphs.most_rows(config)
    sizes = compilation.cudagraph_capture_sizes
    assert sizes == list(derive_buckets(budget=2046, pcp=4, max_requests=requests, steps=0).rows)
    assert most <= sizes[-1] == compilation.max_cudagraph_capture_size < most + 16
    assert compilation.compile_sizes == sorted({*sizes, 100}), "every captured size was to be compiled"


def test_sizes_fit_the_token_budget() -> None:
    """The last bucket is rounded up; the buffers are not."""
    config = configuration(budget=61, requests=100)
    config_graphs.settle_sizes(config, asked=False)
    assert config.compilation_config.cudagraph_capture_sizes[-1] == 61


def test_without_graphs_no_size_is_touched() -> None:
    config = configuration(mode=Mode.NONE)
    config_graphs.settle_sizes(config, asked=False)
    assert config.compilation_config.cudagraph_capture_sizes == []


@pytest.mark.parametrize("name", ["cudagraph_capture_sizes", "max_cudagraph_capture_size", ""])
@pytest.mark.parametrize("place", ["engine", "compilation"])
def test_a_user_asks_for_sizes_in_four_places(place: str, name: str) -> None:
    compilation = SimpleNamespace(cudagraph_capture_sizes=None, max_cudagraph_capture_size=None)
    args = SimpleNamespace(**vars(compilation), compilation_config=compilation)
    if name:
        setattr(args if place == "engine" else compilation, name, 8)
    assert config_graphs.asks_for_sizes(args) is bool(name)


@pytest.mark.parametrize("sizes", [None, [8]])
@pytest.mark.parametrize("mode", [None, Mode.PIECEWISE, Mode.NONE])
def test_sizes_without_a_mode_are_said_to_be_unused(
    vllm: Vllm, caplog: pytest.LogCaptureFixture, mode: Mode | None, sizes: list[int] | None
) -> None:
    owner = SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=None, cudagraph_mode=mode)
    with caplog.at_level("INFO", logger="pcp_passes"):
        config_graphs.no_graphs_by_default(SimpleNamespace(**vars(owner), compilation_config=owner))
    assert owner.cudagraph_mode is (mode or Mode.NONE)
    said = [text for text in caplog.messages if "cudagraph_mode is NONE with PCP unless set to PIECEWISE" in text]
    assert len(said) == len(caplog.messages) == (mode is None and sizes is not None)


def arguments(**values: Any) -> Any:
    """Engine arguments that ask for piecewise graphs."""
    compilation = {
        "cudagraph_mode": Mode.PIECEWISE,
        "mode": 3,
        "splitting_ops": None,
        "pass_config": SimpleNamespace(fuse_attn_quant=None),
    }
    return SimpleNamespace(
        prefill_context_parallel_size=2, compilation_config=SimpleNamespace(**(compilation | values))
    )


def test_attention_fused_into_the_pieces_is_refused_by_its_own_name() -> None:
    """vLLM would settle on whole graphs, and the user would be told to set what is set already."""
    assert config_graphs.graph_arguments(arguments()) is None
    fused = arguments(pass_config=SimpleNamespace(fuse_attn_quant=True))
    said = config_graphs.graph_arguments(fused)
    assert said is not None and "set fuse_attn_quant to false" in said
    fused.prefill_context_parallel_size = 1
    assert config_graphs.graph_arguments(fused) is None, "nothing is sharded: vLLM's own affair"


def test_no_size_left_is_refused() -> None:
    """vLLM drops those above the token budget, and would run without graphs."""
    with pytest.raises(ConfigError, match=r"no size to capture of at most max_num_batched_tokens=64 .* smaller"):
        config_graphs.settle_sizes(configuration(), asked=True)


def test_splits_are_completed_and_not_repeated() -> None:
    config = configuration(splitting_ops=["b::b"], _attention_ops=["vllm::attention"])
    config_graphs.cut(config, ("a::a", "b::b"))
    config_graphs.cut(config, ("a::a", "b::b"))
    assert config.compilation_config.splitting_ops == ["b::b", *config_graphs.CACHE_WRITES, "vllm::attention", "a::a"]
