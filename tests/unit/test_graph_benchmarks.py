# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of graphs in small: steps are packed right, graphs change nothing, and what is wrong is found."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import Request
from pcp_passes.engine.scheduler import Scheduler
from pcp_passes.layout import build_layout, dispatch_tokens
from tests.unit.test_benchmarks import ROOT, run

pytestmark = pytest.mark.unit


@pytest.fixture
def padding(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark of the rows that buckets add, from its file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bucket_padding")


def test_buckets_keep_their_bound_on_made_up_requests() -> None:
    """Measured 1.018 to 1.030; the traces give 1.011 to 1.030 (benchmarks/results/bucket_padding.md)."""
    report = run("bucket_padding", "--generate", "300", "--drafts", "0", "3")
    assert len(report["rows"]) == 12
    for row in report["rows"]:
        assert (
            row["ours"]["padded_over_real"] <= 1.06 and row["ours"]["buckets"] <= 60 and row["ours"]["hit_steps"] == 1
        )
        assert row["prefill_steps"] > 100 and row["vllm_sizes"]["buckets"] == 51
    few = [row["vllm_sizes"]["hit_rows"] for row in report["rows"] if row["budget"] // row["pcp"] >= 1024]
    assert max(few) < 0.1, "vLLM's default sizes hold few rows of large steps"


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_hold_every_token_once(padding: ModuleType, drafts: int) -> None:
    packing, traces = importlib.import_module("buckets.packing"), importlib.import_module("buckets.traces")
    arrivals = traces.generate(60, seed=1)
    serving = packing.Serving(budget=512, max_requests=8, drafts=drafts, load=1.5)
    steps = list(packing.pack(arrivals, serving))
    assert sum(sum(step.chunks) for step in steps) == sum(traces.computed_tokens(arrivals))
    rounds = sum(-(-(one.output - 1) // (1 + drafts // 2)) for one in arrivals)
    assert sum(step.decodes for step in steps) == rounds
    for step in steps:
        assert 0 < sum(step.chunks) + step.decode_tokens <= 512
        assert step.decodes + len(step.chunks) <= 8
    assert any(step.chunks and step.decodes for step in steps) and any(not step.chunks for step in steps)
    mixed = next(step for step in steps if step.chunks and step.decodes)
    batch = packing.batch_of(mixed, drafts)
    layout = build_layout(batch, 4)
    assert dispatch_tokens(batch, 4) == layout.padded_tokens
    assert layout.per_rank_tokens.sum() == sum(mixed.chunks) + 4 * mixed.decode_tokens


def test_steps_are_those_of_the_engine(padding: ModuleType) -> None:
    """The engine's scheduler makes the same chunks and decodes of the same requests, step by step."""
    packing, traces = importlib.import_module("buckets.packing"), importlib.import_module("buckets.traces")
    sizes = [(70, 4), (5, 9), (130, 1), (1, 6), (33, 3), (64, 12), (2, 2)]
    serving = packing.Serving(budget=48, max_requests=3)
    expected = [
        (step.chunks, step.decodes) for step in packing.pack([traces.Arrival(0, *one) for one in sizes], serving)
    ]
    options = EngineOptions(budget=48, max_requests=3, max_len=256, num_blocks=1000, prefix_cache=False)
    scheduler = Scheduler(options, 0)
    for index, (prompt, output) in enumerate(sizes):
        scheduler.add(Request(str(index), (1,) * prompt, SamplingParams(max_tokens=output)))
    found = []
    while (batch := scheduler.schedule()) is not None:
        chunks = tuple(entry.length for entry in batch.entries if entry.is_prefilling)
        found.append((chunks, sum(not entry.is_prefilling for entry in batch.entries)))
        new = [[0] * entry.samples for entry in batch.entries]
        scheduler.collect(batch, new, [[0.0] * len(one) for one in new])
    assert found == expected and len(found) > 10


def test_doubling_sizes_miss_the_bound(padding: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: fewer buckets, too far apart."""
    buckets = importlib.import_module("pcp_passes.piecewise.buckets")
    doubling = buckets.Buckets(tuple(1 << k for k in range(13)), (1,))
    monkeypatch.setattr(padding, "derive_buckets", lambda **_: doubling)
    arrivals = importlib.import_module("buckets.traces").generate(200)
    serving = importlib.import_module("buckets.packing").Serving(2048)
    rows = [{"trace": "made up", **row} for row in padding.measure(arrivals, serving, [4])]
    (said,) = padding.failures({"rows": rows})
    assert "padded over real rows, at most 1.06" in said
    monkeypatch.setattr(padding, "derive_buckets", lambda **_: buckets.Buckets((1, 256), (1,)))
    rows = [{"trace": "made up", **row} for row in padding.measure(arrivals, serving, [4])]
    assert any("above every bucket" in said for said in padding.failures({"rows": rows}))


def test_both_formats_are_read(padding: ModuleType, tmp_path: Path) -> None:
    traces = importlib.import_module("buckets.traces")
    mooncake = tmp_path / "a.jsonl"
    lines = [(2000, 1100, [0, 1, 2]), (0, 1024, [0, 1]), (3000, 1030, [0, 1, 3])]
    mooncake.write_text(
        "".join(
            json.dumps({"timestamp": when, "input_length": n, "output_length": 5, "hash_ids": ids}) + "\n"
            for when, n, ids in lines
        )
    )
    found = traces.read(mooncake)
    assert [(one.seconds, one.prompt) for one in found] == [(0, 1024), (2, 1100), (3, 1030)]
    # The first computes all, the others what follows its two blocks.
    assert traces.computed_tokens(found) == [1024, 76, 6]
    azure = tmp_path / "b.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,48,10\n2023-11-16 18:17:04.1,31,8\n"
    )
    one, other = traces.read(azure)
    assert (one.prompt, one.output, other.prompt) == (48, 10, 31)
    assert other.seconds - one.seconds == pytest.approx(0.12004)
    with pytest.raises(ValueError, match="Mooncake"):
        traces.read(tmp_path / "c.txt") if (tmp_path / "c.txt").write_text("") == 0 else None


def test_vllm_sizes_are_its_defaults(padding: ModuleType) -> None:
    sizes: tuple[Any, ...] = padding.vllm_sizes(256, 0, 8192)
    assert sizes == (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
    assert padding.vllm_sizes(4, 0, 8192) == (1, 2, 4, 8)
    assert padding.vllm_sizes(16, 3, 8192)[-1] == 128 and 12 not in padding.vllm_sizes(4, 0, 8192)


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The GPU script, from its file."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("piecewise_graphs_gpu")


def test_the_gpu_script_runs_on_a_cpu() -> None:
    report = run("piecewise_graphs_gpu", "--device", "cpu", "--only", "glm-dsa tiny", "--quick")
    assert not report["failures"] and "replay checker" in report["card"]
    ways = report["glm-dsa tiny"]
    assert ways["none"]["graphs"] == ways["padded"]["graphs"] == 0 < ways["piecewise"]["graphs"]
    assert ways["full_and_piecewise"]["captured_bytes"] > 0 and ways["full_and_piecewise"]["ms_per_step"] is None
    assert {key.split()[1] for key in ways["full_and_piecewise"]["hits"]} == {"full", "piecewise"}
    assert ways["padded"]["hits"] == ways["full_and_piecewise"]["hits"]


@pytest.mark.soak
def test_the_gpu_script_runs_whole_on_a_cpu(tmp_path: Path) -> None:
    report = run("piecewise_graphs_gpu", "--device", "cpu", "--out", str(tmp_path))
    assert not report["failures"] and report["skipped"] == ["memcheck: no CUDA device"]
    assert any(".sharded piecewise" in key for key in report["two ranks"]["glm-dsa tiny"]["hits"])
    table = (tmp_path / "piecewise_graphs.md").read_text()
    assert "no CUDA graph" in table and "not measured" in table and "two ranks" in table
    assert len(list(tmp_path.glob("graphs-*.json"))) == 1


def test_the_gpu_script_finds_what_differs(graphs: ModuleType) -> None:
    """Sabotage: another token, another log probability, steps without a graph, and no replay of a kind."""
    import torch

    serve = importlib.import_module("graph_runs.serve")
    size = dataclasses.replace(graphs.on_cpu(graphs.TINY_DENSE), layers=1, hidden=16)
    device = torch.device("cpu")
    program = graphs.make_program(size, 1, device)
    right = serve.serve(program, serve.workload(size, 1, device, True), "full_and_piecewise", device)
    assert not serve.differences(right.outputs, right.outputs, 0.0) and not graphs.replayed(right, "full_and_piecewise")
    name, one = next(iter(right.outputs.items()))
    other = dataclasses.replace(one, tokens=(one.tokens[0] + 1, *one.tokens[1:]))
    moved = dataclasses.replace(one, logprobs=tuple(p + 1e-6 for p in one.logprobs))
    for changed, says in ((other, "tokens"), (moved, "log probabilities")):
        run_ = graphs.Run(device, True, 1.0)
        wrong = dataclasses.replace(right, outputs={**right.outputs, name: changed})
        graphs.compare(run_, "case", size, {"none": right, "full_and_piecewise": wrong})
        assert len(run_.failures) == 1 and says in run_.failures[0]
    assert serve.same_tokens({name: other}, {name: one}) == 0
    pieces = {key: count for key, count in right.hits.items() if " full " not in key}
    found = graphs.replayed(dataclasses.replace(right, hits=pieces, without={"why": 2}), "full_and_piecewise")
    assert found == ["2 steps without a graph: why", "no full graph was replayed"]


def test_kernels_serve_the_sizes_that_run_on_a_gpu(graphs: ModuleType) -> None:
    """The check that an engine makes on CUDA, here without one."""
    import torch

    from pcp_passes.engine.requirements import require_kernels
    from pcp_passes.errors import ConfigError

    serve = importlib.import_module("graph_runs.serve")
    cuda = torch.device("cuda")

    def check(size: Any) -> None:
        program = graphs.make_program(size, 1, torch.device("cpu"))
        options = serve.workload(size, 1, cuda, False).options
        require_kernels([body.graph for body in program.target.bodies.values()], options, size.dtype, cuda)

    for size in (graphs.TINY_GLM, graphs.MEDIUM_GLM):
        small = dataclasses.replace(size, hidden=32, inner=16, layers=1, vocab=8)
        check(small)
    with pytest.raises(ConfigError, match="no kernel"):
        check(dataclasses.replace(small, index_dim=24))
