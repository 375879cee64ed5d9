# SPDX-License-Identifier: Apache-2.0
"""Literal vectors of other implementations, through the references and through this project's layouts.

Each is cited in the file. Every test also has a control: the vector of a neighbour, or a broken one, must not fit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pcp_kernels.reference import cache, owner, pack, quant, score, select
from pcp_passes.layout import Batch, build_layout
from tests.comparator import check_form, selected_by_definition

pytestmark = pytest.mark.unit

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "sparse_mla_vectors.json").read_text())


def positions(pcp: int, tokens: int, rank: int, **options: Any) -> list[int]:
    layout = build_layout(Batch([tokens], [0], [tokens]), pcp, **options)
    rows = layout.rows(rank)
    spans = zip(rows.row_start.tolist(), rows.row_length.tolist(), strict=True)
    return [position for start, length in spans for position in range(start, start + length)]


def test_every_vector_is_cited_and_used() -> None:
    source = Path(__file__).read_text()
    assert set(VECTORS["cited"]) == set(VECTORS) - {"cited"}
    assert all(f'VECTORS["{name}"]' in source for name in VECTORS["cited"])


@pytest.mark.parametrize("vector", VECTORS["context_parallel_bounds"], ids=lambda v: f"{v['seq_len_kv']}r{v['rank']}")
@pytest.mark.parametrize("compat", [None, "vllm"])
def test_zigzag_rows_are_data_not_code(vector: dict[str, Any], compat: str | None) -> None:
    tokens, pcp = vector["seq_len_kv"], vector["seq_len_kv"] // vector["seq_len"]
    assert positions(pcp, tokens, vector["rank"], kind="zigzag", compat=compat) == vector["ke"]
    if pcp > 1:
        other = (vector["rank"] + 1) % pcp
        assert positions(pcp, tokens, other, kind="zigzag", compat=compat) != vector["ke"]


@pytest.mark.parametrize("vector", VECTORS["context_parallel_bounds"], ids=lambda v: f"{v['seq_len_kv']}r{v['rank']}")
def test_bounds_select_and_the_row_of_no_keys_selects_none(vector: dict[str, Any]) -> None:
    ks, ke = (torch.tensor(vector[name], dtype=torch.int32) for name in ("ks", "ke"))
    generator = torch.Generator().manual_seed(0)
    q, w = torch.randn(len(ke), 2, 16, generator=generator), torch.randn(len(ke), 2, generator=generator)
    k = torch.randn(vector["seq_len_kv"], 16, generator=generator)
    found = select.topk_rows(q, w, k, None, ks, ke, 4)
    check_form(found, ke - ks, 4)
    assert torch.equal(found, selected_by_definition(score.score(q, w, k), ke, 4))
    empty = (ke == 0).nonzero().flatten().tolist()
    assert empty == ([0] if vector["rank"] == 0 else [])
    assert all(found[row].tolist() == [-1] * 4 for row in empty)


def test_rank_major_example() -> None:
    vector = VECTORS["rank_major"]
    tokens, pcp = vector["query_len"], vector["pcp"]
    layout = build_layout(Batch([tokens], [0], [tokens]), pcp, kind="zigzag", compat="vllm")
    assert layout.restore_index.tolist() == vector["restore"]
    assert layout.gather_index.tolist() == vector["gather"]
    assert layout.write_mask.tolist() == vector["written"]
    for rank in range(pcp):
        held = positions(pcp, tokens, rank, kind="zigzag", compat="vllm")
        assert held == vector["ranks"][rank]
        padded = [position + 1 for position in held] + [0] * (layout.padded_tokens - len(held))
        assert padded == vector["ke"][rank]


def test_rank_major_records_land_in_their_slots_and_padding_nowhere() -> None:
    vector = VECTORS["rank_major"]
    letters = torch.arange(1, 8, dtype=torch.float32)[:, None].expand(7, 4).contiguous()
    gathered = letters[vector["gather"]]
    slots = torch.tensor(vector["gather"]).masked_fill(~torch.tensor(vector["written"]), -1)
    held = torch.zeros(1, 8, 4)
    cache.scatter(held, gathered, slots)
    assert held[0, :, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]
    # Slots in rank-major order as they come would misplace what the second rank holds.
    wrong = torch.zeros(1, 8, 4)
    cache.scatter(wrong, gathered, torch.arange(8))
    assert not torch.equal(wrong, held)


def test_verification_rows() -> None:
    vector = VECTORS["verification"]
    spans = list(zip(vector["seq_lens"], vector["rows"], strict=True))
    found = [length - rows + j + 1 for length, rows in spans for j in range(rows)]
    assert found == vector["ke"]
    # As a layout has it: the context before the rows, and the rows.
    starts = [length - rows for length, rows in spans]
    layout = build_layout(Batch(vector["rows"], starts, starts), 1)
    rows = layout.rows(0)
    held = [s + i + 1 for s, n in zip(rows.row_start.tolist(), rows.row_length.tolist(), strict=True) for i in range(n)]
    assert held == vector["ke"]


def test_interleaved_counts() -> None:
    vector = VECTORS["interleaved_counts"]
    for length, count in zip(vector["lengths"], vector["counts"], strict=True):
        assert len(positions(vector["pcp"], length, vector["rank"], kind="interleave")) == count
    assert len(positions(2, 9, 0, kind="interleave")) != VECTORS["interleaved_counts"]["counts"][1]


@pytest.mark.parametrize(("query_len", "pcp", "rank"), VECTORS["owner"])
def test_owner_of_the_last_token(query_len: int, pcp: int, rank: int) -> None:
    assert owner.owner_rank(query_len, pcp) == rank
    assert query_len - 1 in positions(pcp, query_len, rank, kind="zigzag", compat="vllm")


@pytest.mark.parametrize("vector", VECTORS["full_layers"], ids=lambda v: f"every{v['freq']}from{v['offset']}")
def test_full_and_shared_layers(vector: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GlmMoeDsaConfig(
        num_hidden_layers=78, index_topk_freq=vector["freq"], index_skip_topk_offset=vector["offset"]
    )
    full = [i for i, kind in enumerate(config.indexer_types) if kind == "full"]
    assert full == [i for i in range(78) if max(i - vector["offset"] + 1, 0) % vector["freq"] == 0]
    assert full[: len(vector["first"])] == vector["first"]
    assert full[-1] == vector["last"]
    assert (len(full), config.indexer_types.count("shared")) == (vector["full"], vector["shared"])


@pytest.mark.parametrize(("slot", "value", "scale"), VECTORS["pages"])
def test_page_offsets(slot: int, value: int, scale: int) -> None:
    assert cache.value_offset(slot, 64, 128) == value
    assert cache.scale_offset(slot, 64, 128) == scale


def test_page_offsets_are_where_records_are_written() -> None:
    held = torch.zeros(3, cache.page_bytes(64, 128), dtype=torch.uint8)
    assert held.shape[1] == 8448
    record = torch.cat((torch.full((1, 128), 7, dtype=torch.uint8), torch.full((1, 4), 9, dtype=torch.uint8)), dim=1)
    for slot, value, scale in VECTORS["pages"][:6]:
        held.zero_()
        cache.scatter(held, record, torch.tensor([slot]))
        flat = held.flatten()
        assert flat.nonzero().flatten().tolist() == [*range(value, value + 128), *range(scale, scale + 4)]
        assert flat[scale : scale + 4].tolist() == [9] * 4


@pytest.mark.parametrize(("amax", "scale"), VECTORS["scales"])
def test_scales_of_the_integer_form(amax: float, scale: float) -> None:
    row = torch.tensor([[amax, -amax / 3, 0.0, amax / 7]])
    values, found = quant.quantise(row)
    assert found.tolist() == [[scale]]
    assert bool((values.float().abs() <= 448).all())
    # The record has the same four bytes.
    record = pack.index_pack(row, rounding="fp32")
    assert bytes(record[0, 4:].tolist()) == np.float32(scale).tobytes()


def test_record_bytes() -> None:
    sizes = VECTORS["record_bytes"]
    index, latent = pack.index_pack(torch.zeros(1, 128)), pack.latent_pack(torch.zeros(1, 512), torch.zeros(1, 64))
    assert (index.nbytes, latent.nbytes) == (sizes["index"], sizes["latent"])
    assert pack.combine_records(latent, index).nbytes == sizes["combined"]
    wide = pack.combine_records(
        pack.latent_pack(torch.zeros(1, 512), torch.zeros(1, 64), store="bf16"),
        pack.index_pack(torch.zeros(1, 128), store="bf16"),
    )
    assert wide.nbytes == sizes["bf16"]


def test_no_key_is_scored_while_all_are_selected() -> None:
    # NaN everywhere: scoring would not even be able to order them.
    q, w, k = torch.full((1, 2, 16), float("nan")), torch.ones(1, 2), torch.full((2048, 16), float("nan"))
    found = select.topk_rows(q, w, k, None, torch.tensor([0]), torch.tensor([2048]), 2048)
    assert torch.equal(found[0], torch.arange(2048, dtype=torch.int32))
