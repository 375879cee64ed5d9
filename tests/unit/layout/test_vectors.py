# SPDX-License-Identifier: Apache-2.0
"""compat="vllm" against recorded values of vLLM's own manager: 318 cases, 28 digests over 45,748 batches, errors."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pcp_passes.errors import LayoutError
from pcp_passes.layout import Batch, Layout, build, build_layout, dispatch_tokens, partition
from pcp_passes.plan import StepPlan

pytestmark = pytest.mark.unit

_PATH = Path(__file__).parents[2] / "data" / "layout_vectors.json.gz"
VECTORS: dict[str, Any] = json.loads(gzip.decompress(_PATH.read_bytes()))
CASES = VECTORS["cases"]
FAMILIES = sorted({case["id"].rsplit("-", 1)[0] for case in CASES})


def expand(value: Any) -> list[int]:
    """The file's run-length coding."""
    if isinstance(value, list):
        return [int(x) for x in value]
    flat = value["runs"]
    triples = [(flat[i], flat[i + 1], flat[i + 2]) for i in range(0, len(flat), 3)]
    return [start + step * i for start, count, step in triples for i in range(count)]


def decode_mode(case_in: dict[str, Any]) -> str:
    return "owner" if case_in["shard_decode"] else "replicate"


def load_batch(case_in: dict[str, Any]) -> Batch:
    flags = np.array(expand(case_in["is_prefilling"]), dtype=bool)
    lens, computed, goal = (
        expand(case_in[name]) for name in ("num_scheduled_tokens", "num_computed_tokens", "prefill_len")
    )
    assert np.array_equal(Batch(lens, computed, goal).is_prefilling, flags), "the default flag"
    return Batch(lens, computed, goal, flags)


def load_layout(case_in: dict[str, Any]) -> Layout:
    return build_layout(
        load_batch(case_in),
        case_in["pcp"],
        decode=decode_mode(case_in),
        compat="vllm",
        padded_tokens=case_in["padded_num_tokens"],
    )


def check_case(case: dict[str, Any]) -> None:
    given, out = case["in"], case["out"]
    layout = load_layout(given)
    batch, pcp = layout.batch, given["pcp"]
    assert dispatch_tokens(batch, pcp, decode=layout.decode, compat="vllm") == out["num_tokens_for_dispatch"]
    assert layout.per_rank_tokens.tolist() == expand(out["per_rank_num_tokens"])
    bounds = layout.row_offsets.tolist()
    for rank, segments in enumerate(out["segments"]):
        own = slice(bounds[rank], bounds[rank + 1])
        found = np.stack([layout.seg_request[own], layout.seg_start[own], layout.seg_length[own]], axis=1)
        assert found.tolist() == segments
        assert layout.seg_offset[own].tolist() == np.cumsum([0, *[s[2] for s in segments]])[:-1].tolist()
    assert layout.gather_index.tolist() == expand(out["padded_gather_idx"])
    assert layout.write_mask.astype(int).tolist() == expand(out["gathered_kv_write_mask"])
    assert layout.restore_index.tolist() == expand(out["hidden_restore_idx"])
    for rank, expected in enumerate(out["ranks"]):
        rows = layout.rows(rank, padded_rows=given["padded_num_rows"])
        assert rows.row_request.tolist() == expand(expected["row_request"])
        assert rows.num_tokens == expected["num_tokens"]
        assert rows.num_padded_rows == expected.get("num_rows_padded", rows.num_rows)
        assert rows.query_start_loc.tolist() == expand(expected["query_start_loc"])
        assert rows.query_start_loc.dtype == rows.seq_lens_host.dtype == np.int32
        assert rows.seq_lens_host.tolist() == expand(expected.get("seq_lens_host", expected["seq_lens"]))
        assert rows.row_start.tolist() == expand(expected["num_computed_tokens"])
        assert rows.is_prefilling.astype(int).tolist() == expand(expected["is_prefilling"])


def check_case_plan(case: dict[str, Any]) -> None:
    """The device side: positions, lengths and slots from device counts that may lag the host's."""
    given, out = case["in"], case["out"]
    layout = load_layout(given)
    lens = expand(given["num_scheduled_tokens"])
    computed = expand(given.get("device_num_computed_tokens", given["num_computed_tokens"]))
    block, tables = given["block_size"], [expand(row) for row in given["block_table"]]
    positions, slots = [], []
    for request, slot in enumerate(expand(given["request_slot"])):
        for position in range(computed[request], computed[request] + lens[request]):
            positions.append(position)
            slots.append(tables[slot][position // block] * block + position % block)
    assert slots == expand(out["slot_mapping"]), "the fixture's own slots"
    ids = torch.arange(1, len(positions) + 1, dtype=torch.int32)
    for rank, expected in enumerate(out["ranks"]):
        num_rows = given["padded_num_rows"] or layout.max_rows
        plan = StepPlan(given["pcp"], rank, max_tokens=layout.padded_tokens + 3, max_rows=num_rows + 2, device="cpu")
        plan.load(layout, padded_rows=given["padded_num_rows"])
        view = plan.shard_tokens(ids, torch.tensor(positions, dtype=torch.int64))
        assert view.query_start_loc.tolist() == expand(expected["query_start_loc"])
        assert view.seq_lens.tolist() == expand(expected["seq_lens"])
        assert view.positions.tolist() == expand(expected["positions"])
        gathered = plan.expand_slots(torch.tensor([slots], dtype=torch.int64))
        assert gathered[0].tolist() == expand(out["gathered_slot_mapping"])


def test_fixture_is_complete() -> None:
    assert (len(CASES), len(VECTORS["digests"]), len(VECTORS["errors"])) == (318, 28, 4)
    assert sum(digest["num_batches"] for digest in VECTORS["digests"]) == 45748


@pytest.mark.parametrize("family", FAMILIES)
def test_cases(family: str) -> None:
    for case in CASES:
        if case["id"].startswith(family + "-"):
            try:
                check_case(case)
                check_case_plan(case)
            except AssertionError as error:
                raise AssertionError(f"case {case['id']}") from error


@pytest.mark.parametrize("index", range(4), ids=lambda i: VECTORS["errors"][i]["reason"].replace(" ", "-"))
def test_errors(index: int) -> None:
    given = VECTORS["errors"][index]["in"]
    with pytest.raises(LayoutError) as caught:
        load_layout(given).rows(0, padded_rows=given["padded_num_rows"])
    # Any rank refuses what one rank cannot hold.
    with pytest.raises(LayoutError):
        load_layout(given).rows(given["pcp"] - 1, padded_rows=given["padded_num_rows"])
    assert str(caught.value).endswith(".")


def batch_bytes(batch: Batch, pcp: int, decode: str) -> bytes:
    layout = build_layout(batch, pcp, decode=decode, compat="vllm")
    segments = np.empty((len(layout.seg_rank), 3), dtype=np.int64)
    segments[:, 0], segments[:, 1], segments[:, 2] = layout.seg_request, layout.seg_start, layout.seg_length
    counts = layout.rows_per_rank.tolist()
    pieces = [
        np.array([dispatch_tokens(batch, pcp, decode=decode, compat="vllm")], dtype=np.int64).tobytes(),
        layout.per_rank_tokens.tobytes(),
    ]
    begin = 0
    for count in counts:
        pieces += [count.to_bytes(8, "little"), segments[begin : begin + count].tobytes()]
        begin += count
    mask = layout.write_mask.astype(np.int64)
    return b"".join([*pieces, layout.gather_index.tobytes(), mask.tobytes(), layout.restore_index.tobytes()])


@pytest.mark.parametrize(
    "digest",
    VECTORS["digests"],
    ids=[f"p{d['pcp']}-{decode_mode(d)}-n{d['num_requests']}" for d in VECTORS["digests"]],
)
def test_digests(digest: dict[str, Any]) -> None:
    pcp, count = digest["pcp"], digest["num_requests"]
    decode = decode_mode(digest)
    symbols = [(flag, length) for flag in (0, 1) for length in range(2 * pcp + 3)]
    zeros = np.zeros(count, dtype=np.int32)
    whole, seen = hashlib.sha256(), 0
    for first, part in zip(symbols, digest["parts"], strict=True):
        hasher = hashlib.sha256()
        for rest in itertools.product(symbols, repeat=count - 1):
            table = np.array((first, *rest), dtype=np.int32)
            batch = Batch(table[:, 1].copy(), zeros, zeros, table[:, 0] == 1)
            hasher.update(batch_bytes(batch, pcp, decode))
            seen += 1
        assert hasher.hexdigest()[:16] == part, f"batches whose first request is (is_prefilling, length) = {first}"
        whole.update(hasher.digest())
    assert whole.hexdigest() == digest["sha256"]
    assert seen == digest["num_batches"]


def test_sabotage_one_case_and_one_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With chunks of floor instead of ceil the recorded values are seen to differ."""

    def wrong(query_lens: np.ndarray, pcp: int) -> np.ndarray:
        return partition.even_chunks(query_lens, pcp, 2, 0)

    monkeypatch.setattr(partition, "vllm_chunks", wrong)
    monkeypatch.setattr(build, "vllm_chunks", wrong)
    case = next(case for case in CASES if case["id"].startswith("mixed-p2"))
    with pytest.raises(AssertionError):
        check_case(case)
    with pytest.raises(AssertionError):
        test_digests(next(d for d in VECTORS["digests"] if d["pcp"] == 2 and d["num_requests"] == 1))
