# SPDX-License-Identifier: Apache-2.0
"""The Prometheus metrics of a real engine against what its probe recorded and vLLM's scheduler counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pcp_passes import collectives
from pcp_passes.frontends.vllm import metrics
from pcp_passes.speculative.acceptance import AcceptanceCounters
from tests.vllm.dspark_models import STEPS
from tests.vllm.test_dspark import _PROBED, two


def scrape(group: int) -> dict[str, float]:
    """What was scraped after ``group``."""
    found: dict[str, float] = two().front[group][0]
    return found


def scraped(name: str, label: object = "") -> float:
    """How much a metric grew between the start of the probe and its end."""
    before, after = scrape(0), scrape(_PROBED)
    key = f"pcp_{name} {label}".strip()
    return after[key] - before.get(key, 0)


def probe(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = two().rpc[_PROBED][0][rank]
    return found


def test_counting_begins_after_the_warm_up() -> None:
    assert {key: value for key, value in scrape(0).items() if key.startswith("pcp_") and value} == {}


@pytest.mark.parametrize("rank", [0, 1])
def test_rows_and_bytes_are_those_that_the_probe_saw(rank: int) -> None:
    steps, sent = probe(rank)["steps"], probe(rank)["collectives"]
    rows = sum(step["rows_per_rank"][rank] for step in steps)
    padded = sum(max(step["padded_rows"], *step["rows_per_rank"]) for step in steps)
    assert scraped("rows_total", rank) == rows
    assert scraped("padding_rows_total", rank) == padded - rows
    for body in ("sharded", "replicated"):
        assert scraped(f"{body}_steps_total", rank) == sum(step["variant"] == body for step in steps) > 0
    assert scraped("collectives_total", rank) == len(sent) > 0
    assert scraped("bytes_total", rank) == sum(one["bytes"] for one in sent)
    assert scrape(_PROBED)[f"pcp_bytes_per_step {rank}"] == sum(one["bytes"] for one in sent) / len(steps)


def test_imbalance() -> None:
    steps = probe(0)["steps"]
    busiest = sum(max(step["rows_per_rank"]) for step in steps)
    mean = sum(sum(step["rows_per_rank"]) for step in steps) / 2
    assert scrape(_PROBED)["pcp_row_imbalance"] == pytest.approx(busiest / mean, abs=1e-12)
    assert busiest > mean


def test_accepted_tokens_are_those_that_the_probe_saw() -> None:
    accepted = [n - 1 for step in probe(0)["accepted"] for n in step.values() if n > 1]
    for position in range(STEPS):
        assert scraped("accepted_tokens_total", position) == sum(n > position for n in accepted) > 0


def test_drafts_and_acceptance_are_those_that_the_scheduler_counted() -> None:
    after = scrape(_PROBED)
    assert sum(scraped("draft_tokens_total", p) for p in range(STEPS)) == after["spec_decode_num_draft_tokens_total"]
    for position in range(STEPS):
        theirs = after[f"spec_decode_num_accepted_tokens_per_pos_total {position}"]
        assert scraped("accepted_tokens_total", position) == theirs
    rounds, accepted = after["spec_decode_num_drafts_total"], after["spec_decode_num_accepted_tokens_total"]
    assert after["pcp_acceptance_length"] == pytest.approx(1 + accepted / rounds, abs=1e-12)


# -- without an engine ---------------------------------------------------------------------------------------


def totals(folder: Path, rank: int = 0, **options: Any) -> metrics.RankTotals:
    return metrics.RankTotals(folder / f"rank-{rank}.npy", rank, AcceptanceCounters(2, **options))


def families(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], float]:
    monkeypatch.setenv(metrics.FOLDER, str(folder))
    samples = [sample for family in metrics.Collector().collect() for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


def test_another_process_reads_what_a_rank_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [totals(tmp_path, rank) for rank in (0, 1)]
    assert families(tmp_path, monkeypatch)["vllm:pcp_rows_total", "1"] == 0
    for each in ranks:
        each.step({"variant": "sharded", "padded_rows": 4, "rows_per_rank": [4, 1], "tokens": 5})
    ranks[0].verified(np.array([2, 0, 1]), np.array([2, 0, 2]))  # the rank whose tokens are used
    found = families(tmp_path, monkeypatch)
    assert found["vllm:pcp_rows_total", "0"] == 4
    assert found["vllm:pcp_rows_total", "1"] == 1
    assert found["vllm:pcp_padding_rows_total", "1"] == 3
    assert found["vllm:pcp_row_imbalance",] == 4 / 2.5
    assert [found["vllm:pcp_draft_tokens_total", p] for p in "01"] == [2, 1]
    assert [found["vllm:pcp_accepted_tokens_total", p] for p in "01"] == [2, 0]
    assert found["vllm:pcp_acceptance_length",] == 2


def test_replicas_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of two PCP ranks each; the second one is busier, and less even."""
    ranks = [totals(tmp_path, rank) for rank in range(4)]
    for number, rows in enumerate(([2, 2], [2, 2], [6, 2], [6, 2])):
        ranks[number].rank = number % 2
        ranks[number].step({"variant": "sharded", "padded_rows": max(rows), "rows_per_rank": rows, "tokens": sum(rows)})
    ranks[0].verified(np.array([2]), np.array([3]))
    ranks[2].verified(np.array([2, 2]), np.array([1, 2]))
    found = families(tmp_path, monkeypatch)
    assert [found["vllm:pcp_rows_total", rank] for rank in "0123"] == [2, 2, 6, 2]
    assert found["vllm:pcp_row_imbalance",] == (2 + 2 + 6 + 6) / 12
    assert [found["vllm:pcp_accepted_tokens_total", p] for p in "01"] == [2, 1]
    assert found["vllm:pcp_acceptance_length",] == 2


def test_collectives_are_counted_and_not_kept(tmp_path: Path) -> None:
    mine = totals(tmp_path)
    with collectives.bound_axis("pcp", lambda rows: torch.cat([rows, rows])):
        with collectives.record_collectives(mine):
            collectives.all_gather_rows(torch.zeros(3, 5), 2, "pcp")
        collectives.all_gather_rows(torch.zeros(3, 5), 2, "pcp")
    assert mine.values[metrics._AT["collectives"]] == 1
    assert mine.values[metrics._AT["bytes"]] == 3 * 5 * 4
    assert mine.entries == []


def test_low_acceptance_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = totals(tmp_path, floor=0.5, window=2)
    with caplog.at_level(logging.WARNING):
        mine.verified(np.array([2, 2]), np.array([3, 2]))
        assert caplog.messages == []
        mine.verified(np.array([2, 2]), np.array([1, 2]))
    assert len(caplog.messages) == 1
    assert "25.0 %" in caplog.messages[0]


def test_a_rank_begins_at_zero_again(tmp_path: Path) -> None:
    totals(tmp_path).step({"variant": "replicated", "padded_rows": 2, "rows_per_rank": [2, 2], "tokens": 2})
    assert metrics.read(tmp_path)[0][metrics._AT["rows"]] == 2
    totals(tmp_path)
    assert not any(metrics.read(tmp_path)[0])


def test_a_file_without_a_whole_header_is_left_out(tmp_path: Path) -> None:
    totals(tmp_path, rank=1)
    (tmp_path / "rank-0.npy").write_bytes(b"\x93NUM")
    assert list(metrics.read(tmp_path)) == [1]


def test_offline_engines_list_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``LLM.get_metrics`` reads the process's own registry."""
    from prometheus_client import REGISTRY
    from vllm.v1.metrics.reader import get_metrics_snapshot

    totals(tmp_path).step({"variant": "sharded", "padded_rows": 4, "rows_per_rank": [4], "tokens": 4})
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    metrics.attach(REGISTRY)
    metrics.attach(REGISTRY)
    found = [metric for metric in get_metrics_snapshot() if metric.name == "vllm:pcp_rows"]
    assert [(metric.labels, metric.value) for metric in found] == [({"rank": "0"}, 4)]


def test_every_api_server_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several of them vLLM makes a registry for each scrape."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = metrics.around_registry(CollectorRegistry)
    monkeypatch.delenv(metrics.FOLDER, raising=False)
    assert generate_latest(registry()) == b""
    totals(tmp_path)
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path))
    for _ in range(2):
        assert b'vllm:pcp_rows_total{rank="0"}' in generate_latest(registry())
