# SPDX-License-Identifier: Apache-2.0
"""Rows for experts of other ranks: records, the mask of padded rows, and the sums of a shard in every form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pcp_passes.capture_mode import capturable_only
from pcp_passes.errors import ConfigError
from pcp_passes.mesh.experts import shard_range
from pcp_passes.paged import AttentionInputs, PagedCaches, experts, running
from pcp_passes.paged.experts import experts_op
from pcp_passes.paged.routed import (
    ExpertShard,
    local_experts,
    local_experts_op,
    mask_routed,
    mask_routed_op,
    pack_routed,
    pack_routed_op,
    partial_sum,
    record_layout,
    unpack_routed,
    unpack_routed_op,
)

pytestmark = pytest.mark.unit
ROWS, HIDDEN, INNER, EXPERTS, WIDTH = 9, 6, 5, 5, 2
KINDS = [
    (torch.float64, torch.int64, torch.float64), (torch.bfloat16, torch.int64, torch.float32),
    (torch.bfloat16, torch.int32, torch.bfloat16), (torch.float16, torch.int64, torch.float64),
]  # fmt: skip


def operands(hidden: torch.dtype = torch.float64, index: Any = torch.int64, weights: Any = torch.float64) -> Any:
    torch.manual_seed(0)
    chosen = torch.rand(ROWS, EXPERTS).argsort(1)[:, :WIDTH]
    return torch.randn(ROWS, HIDDEN).to(hidden), chosen.to(index), torch.rand(ROWS, WIDTH).to(weights)


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(EXPERTS, 2 * INNER, HIDDEN).double(), torch.randn(EXPERTS, HIDDEN, INNER).double()


def shards(ranks: int) -> list[ExpertShard]:
    found = []
    for rank in range(ranks):
        first, count = shard_range(EXPERTS, rank, ranks)
        gate_up, down = (m[first : first + count] for m in matrices())
        found.append(ExpertShard(gate_up, down, first, EXPERTS))
    return found


def call(rows: int = ROWS, real: int = ROWS) -> AttentionInputs:
    zeros, ends = torch.zeros(rows, dtype=torch.int64), torch.tensor([0, real])
    return AttentionInputs(zeros, "replicated", torch.zeros(1, 1, dtype=torch.int32), ends, ends[1:], zeros)


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "-".join(str(kind).removeprefix("torch.") for kind in kinds))
def test_records_bring_back_every_bit_and_dtype(kinds: Any) -> None:
    given = operands(*kinds)
    layout = record_layout(*given)
    record = pack_routed(*given)
    assert record.dtype == torch.uint8 and record.shape[1] == sum(x[0].nbytes for x in given)
    gathered = torch.cat([record, record.flip(0)])
    for found, part in zip(unpack_routed(gathered, layout), given, strict=True):
        assert found.dtype == part.dtype and torch.equal(found, torch.cat([part, part.flip(0)]))
    wrong = unpack_routed(record.roll(1, 1), layout)
    assert not torch.equal(wrong[1], given[1]), "a record that begins elsewhere is seen"


def test_a_record_of_other_parts_is_refused() -> None:
    record = pack_routed(*operands())
    for layout in ("float64[6] int64[2]", "float64[6] int64[2] float64", "float64[6] int64[2] double63[2]"):
        with pytest.raises(ConfigError, match="pcp::unpack_routed"):
            unpack_routed(record, layout)
    with pytest.raises(ConfigError, match=r"found torch.uint8\[9, 80\] .*required uint8 \[N, 72\]"):
        unpack_routed(record, "float64[6] int64[2] float32[2]")


def test_padded_rows_get_no_expert() -> None:
    _, chosen, _ = operands()
    with running(PagedCaches(1, 1), call(real=6)):
        found = mask_routed(chosen)
        with pytest.raises(ConfigError, match="4 rows are routed in a call of 9"):
            mask_routed(chosen[:4])
    assert torch.equal(found[:6], chosen[:6]) and (found[6:] == -1).all() and (chosen >= 0).all()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_shards_sum_to_the_whole(ranks: int) -> None:
    hidden, chosen, weights = operands()
    whole = experts_op(hidden, chosen, weights, *matrices(), "silu")
    parts = [partial_sum(hidden, chosen, weights, shard, "silu") for shard in shards(ranks)]
    torch.testing.assert_close(sum(parts), whole, rtol=0, atol=1e-12)
    assert (sum(parts[1:], torch.zeros_like(whole)) - whole).abs().max() > 1e-2, "a missing shard is seen"
    with capturable_only():
        gathered = [partial_sum(hidden, chosen, weights, shard, "silu") for shard in shards(ranks)]
    torch.testing.assert_close(torch.stack(gathered), torch.stack(parts), rtol=0, atol=1e-12)


def test_a_row_that_is_not_routed_gives_nothing_whatever_it_holds() -> None:
    hidden, chosen, weights = operands()
    chosen[3], hidden[3], weights[3] = -1, torch.nan, torch.inf
    for shard in shards(2):
        for form in ("loaded", "gathered"):
            if form == "gathered":
                with capturable_only():
                    found = partial_sum(hidden, chosen, weights, shard, "silu")
            else:
                found = partial_sum(hidden, chosen, weights, shard, "silu")
            assert torch.isfinite(found).all() and not found[3].any() and found[2].any()


def test_the_grouped_form_drops_what_lies_behind_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The card's form, with a stand-in for the product that leaves rows of no group undefined."""

    def product(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        out = torch.full((len(x), w.shape[2]), torch.nan, dtype=x.dtype)
        for group, (start, end) in enumerate(zip([0, *offs.tolist()], offs.tolist(), strict=False)):
            out[start:end] = x[start:end] @ w[group]
        return out

    monkeypatch.setattr(torch, "_grouped_mm", product)
    hidden, chosen, weights = operands()
    chosen[4] = -1
    for shard in shards(2):
        wanted = partial_sum(hidden, chosen, weights, shard, "silu")
        with monkeypatch.context() as patch:
            patch.setattr(experts, "has_grouped", lambda *given: True)
            found = partial_sum(hidden, chosen, weights, shard, "silu")
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_half_precision_keeps_its_dtype() -> None:
    hidden, chosen, weights = operands(torch.bfloat16, torch.int64, torch.float32)
    gate_up, down = (m.bfloat16() for m in matrices())
    found = partial_sum(hidden, chosen, weights, ExpertShard(gate_up, down, 0, EXPERTS), "silu")
    wanted = experts_op(hidden, chosen, weights, gate_up, down, "silu")
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted)


def test_what_cannot_be_is_named() -> None:
    hidden, chosen, weights = operands()
    for wrong in (EXPERTS, -2):
        spoilt = chosen.clone()
        spoilt[0, 0] = wrong
        for shard in shards(2):
            with pytest.raises(ConfigError, match=rf"top_k_index from .*{wrong}.*required -1 to {EXPERTS - 1}"):
                partial_sum(hidden, spoilt, weights, shard, "silu")
    with pytest.raises(ConfigError, match="no activation 'quick'"):
        partial_sum(hidden, chosen, weights, shards(1)[0], "quick")
    with pytest.raises(ConfigError, match="an expert shard of 5 gate-up and 5 down matrices from expert 1 of 5"):
        ExpertShard(*matrices(), 1, EXPERTS)
    with running(PagedCaches(1, 1), call()), pytest.raises(ConfigError, match=r"holds no experts of 'target.mlp'"):
        local_experts(hidden, chosen, weights, "target.mlp", "silu")


def test_per_request_rows_are_no_negative_number() -> None:
    held = call()
    with pytest.raises(ConfigError, match="per_request is -1"):
        AttentionInputs(held.slots, "replicated", held.block_tables, held.query_start_loc, held.seq_lens,
                        held.positions, -1)  # fmt: skip


def test_operator_checks() -> None:
    given = operands()
    caches = PagedCaches(1, 1)
    caches.experts = {"mlp": shards(2)[0]}
    with running(caches, call()):
        torch.library.opcheck(mask_routed_op, given[1:2])
        torch.library.opcheck(pack_routed_op, given)
        torch.library.opcheck(unpack_routed_op, (pack_routed(*given), record_layout(*given)))
        torch.library.opcheck(local_experts_op, (*given, "mlp", "silu"))
