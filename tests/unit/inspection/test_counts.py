# SPDX-License-Identifier: Apache-2.0
"""The figures against PyTorch's own counter, a run of all ranks, a capture of every layer, and published sizes."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from pcp_passes.frontends.torch.executors import SimulatedExecutor
from pcp_passes.frontends.torch.inspection import simulated
from pcp_passes.inspection import run
from pcp_passes.inspection.layers import LayerKind, LayerStack
from pcp_passes.inspection.ledger import Cost, peak_live_bytes
from pcp_passes.inspection.report import ModelReport
from pcp_passes.inspection.run import inspect_config
from pcp_passes.inspection.sources import load_config
from tests.unit.inspection.configs import GLM, GPT_OSS, LLAMA, MAMBA2

NARROW = 1.0
"""Operations a byte is worth, for models this narrow: a GPU's figure would have them repeat whole layers."""


CONFIGS = {"llama": LLAMA, "glm_moe_dsa": GLM, "gpt_oss": GPT_OSS, "mamba2": MAMBA2}


@functools.cache
def report_of(name: str, **options: Any) -> ModelReport:
    return inspect_config(CONFIGS[name], **{"pcp": 4, "tokens": 64, "dtype": "fp32", "balance": NARROW, **options})[0]


def real_model(config: dict[str, Any]) -> torch.nn.Module:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    given = {key: held for key, held in config.items() if key != "model_type"}
    parsed = CONFIG_MAPPING[config["model_type"]](**given, use_cache=False)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(parsed, attn_implementation="sdpa", dtype=torch.float32)
    return model.eval().requires_grad_(False)


def totals(report: ModelReport) -> dict[str, Any]:
    """Every figure that is a sum over layers."""
    return {
        "whole": report.whole, "rank": report.by_category(), "collectives": report.collectives, "sent": report.sent,
        "seen": report.seen(), "cache": (report.memory.cache_per_token, report.memory.cache),
        "weights": report.memory.weights, "parameters": sum(k.parameters * k.times for k in report.kinds),
        "repeated": sum(f.times for f in report.fallbacks),
    }  # fmt: skip


def test_one_rank_alone_is_what_pytorch_counts() -> None:
    model, ids = real_model(LLAMA), torch.zeros(1, 64, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(input_ids=ids)
    assert report_of("llama", outputs="global").whole.products == counter.get_total_flops()


@pytest.mark.parametrize("tokens", [64, 61])
def test_the_ranks_together_do_what_a_simulated_run_does(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """61 tokens: three padded rows are computed too, and counted."""
    counter, run_ranks = FlopCounterMode(display=False), SimulatedExecutor.run

    def counted(self: SimulatedExecutor, program: Any, arguments: Any, plan: Any) -> Any:
        with counter:
            return run_ranks(self, program, arguments, plan)

    monkeypatch.setattr(SimulatedExecutor, "run", counted)
    sharded = simulated(real_model(LLAMA), 4, tokens={"input_ids": 1})
    sharded(input_ids=torch.zeros(1, tokens, dtype=torch.int64))
    report = report_of("llama", outputs="global", tokens=tokens)
    assert 4 * report.rank.products == counter.get_total_flops()
    executor: Any = sharded.sharded.backend.make_executor()
    assert {(log.calls, log.bytes) for log in executor.logs} == {(report.collectives, report.sent)}


@pytest.mark.parametrize("name", ["glm_moe_dsa", "gpt_oss"])
def test_multiplied_layers_are_a_capture_of_all_layers(name: str) -> None:
    multiplied, full = report_of(name), report_of(name, full=True)
    assert len(multiplied.kinds) < len(full.kinds) == 6
    assert totals(multiplied) == totals(full)
    assert not multiplied.notes


def test_a_wrong_multiple_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the last layer, which computes the last token only, were like the others."""
    right = totals(report_of("llama"))
    found = run.find_stack

    def merged(model: Any, config: Any) -> LayerStack:
        stack = found(model, config)
        return replace(stack, kinds=(LayerKind("layer", (0, 1, 2, 3)),))

    monkeypatch.setattr(run, "find_stack", merged)
    wrong = totals(report_of.__wrapped__("llama"))
    assert wrong["whole"] != right["whole"]
    assert wrong["sent"] != right["sent"]


def test_a_gather_in_another_layer_is_told() -> None:
    """Where a byte is dear, a narrow model gathers once and repeats whole layers: no layer stands for another."""
    assert any("figures multiplied" in note for note in report_of("gpt_oss", balance=1e9).notes)


def test_what_mixes_tokens_is_listed_with_its_place() -> None:
    report = report_of("mamba2", balance=1000.0)
    assert report.notes == ("no matrix product is sharded: every rank runs all of them",)
    convolution = next(line for line in report.fallbacks if line.op == "aten::conv1d")
    assert convolution.source.startswith("modeling_mamba2.py:")
    assert convolution.module == "backbone.layers.0.mixer"
    assert "neighbouring" in convolution.reason
    assert report.by_category()["fallback"].products > 0
    assert report.by_category()["sharded"].products == 0


def test_the_cache_of_a_token_is_what_is_gathered_of_it() -> None:
    keys_and_values = 4 * 2 * 2 * 16 * 4  # layers, K and V, heads, channels, bytes
    report = report_of("llama")
    assert (report.memory.cache_per_token, report.memory.cache) == (keys_and_values, 64 * keys_and_values)
    windowed = report_of("gpt_oss")
    per_layer = 2 * 2 * 16 * 4
    assert windowed.memory.cache == 3 * per_layer * 64 + 3 * per_layer * 16  # full layers, windows of 16


def test_layouts_differ_in_balance_only() -> None:
    even, uneven = report_of("llama"), report_of("llama", layout="contiguous")
    assert even.imbalance < 1.001 < 1.5 < uneven.imbalance
    assert even.bound_seen > uneven.bound_seen
    assert (even.rank, even.sent) == (uneven.rank, uneven.sent)


def test_what_a_choice_repeats_lowers_the_bound() -> None:
    """Where a byte is worth more, keys and values are computed whole from the latent, which is narrower."""
    moved, repeated = report_of("glm_moe_dsa"), report_of("glm_moe_dsa", balance=100.0)
    assert moved.by_category()["repeated"].products == 0 < repeated.by_category()["repeated"].products
    assert repeated.sent < moved.sent
    assert 1.0 < repeated.bound < moved.bound <= 4.0
    assert any("repeats" in choice.text for choice in repeated.choices)


def chain(x: torch.Tensor) -> torch.Tensor:
    wide = torch.cat([x, x, x, x])
    narrow = wide.view(4, -1).sum(0)
    return (narrow + 1) * 2


def test_the_largest_live_set_is_counted_by_hand() -> None:
    graph: fx.Graph = make_fx(chain, tracing_mode="fake")(torch.zeros(8)).graph
    # The 128 bytes of `wide` and the 32 of its sum; the view holds `wide`; afterwards two of 32 at a time.
    assert peak_live_bytes(graph) == 128 + 32


def test_costs_add_up() -> None:
    assert Cost(1, 2) * 3 + Cost(4, 5) == Cost(7, 11)


PUBLISHED = {
    "llama-405b": (405.8e9, 406.0e9, 126 * 2 * 8 * 128 * 2),
    "qwen3-235b": (235.0e9, 235.2e9, 94 * 2 * 4 * 128 * 2),
    "deepseek-v3.2": (670e9, 673e9, 61 * (576 + 128) * 2),
    "glm-5.2": (742e9, 745e9, (78 * 576 + 21 * 128) * 2),
}
"""Parameters from and to, and bytes of a token in the cache: keys and values, or latent and index keys."""


SHIPPED = [pytest.param(name, marks=[] if name == "llama-405b" else pytest.mark.soak) for name in PUBLISHED]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_has_its_published_size_and_takes_under_a_minute(name: str) -> None:
    low, high, cached = PUBLISHED[name]
    began = time.process_time()
    report, _ = inspect_config(load_config(name), pcp=4, tokens=32768)
    assert time.process_time() - began < 60
    assert low < report.memory.parameters < high
    assert report.memory.weights >= 2 * report.memory.parameters
    assert report.memory.cache_per_token == cached
    assert (report.rows, report.real_rows) == (8192, (8192,) * 4)
    assert not report.fallbacks
    assert not report.notes
    assert 3.5 < report.bound_seen <= 4.0
    assert report.sent == 8192 * cached + sum(g.sent * g.times for g in report.gathers if g.sent < 8192 * 32)
