# SPDX-License-Identifier: Apache-2.0
"""An independent oracle: one Python loop per token, written from the definitions, sharing no code with the package.

``check_layout`` and ``check_plan`` raise AssertionError; the sabotage tests show that they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pcp_passes.layout import Batch, Layout
from pcp_passes.plan import StepPlan, StepView

KINDS = ("zigzag", "interleave", "contiguous")
DECODES = ("replicate", "owner")


@dataclass(frozen=True)
class Token:
    """One token on one rank."""

    request: int
    offset: int  # inside the request's query
    index: int  # in the global batch
    written: bool


def make_batch(
    lens: Sequence[int], computed: Sequence[int] | None = None, prefilling: Sequence[bool] | None = None
) -> Batch:
    """A batch whose prefills have their whole rest scheduled."""
    context = [0] * len(lens) if computed is None else list(computed)
    flags = [True] * len(lens) if prefilling is None else [bool(f) for f in prefilling]
    goal = [c + max(n, 1) if f else c for n, c, f in zip(lens, context, flags, strict=True)]
    return Batch(list(lens), context, goal, np.array(flags, dtype=bool))


def chunk_sizes(query: int, pcp: int, kind: str, cursor: int) -> list[int]:
    """Sizes of a query's chunks in token order; remainder tokens are dealt out one by one from rank ``cursor``."""
    count = 2 * pcp if kind == "zigzag" else pcp
    sizes = [query // count] * count
    for k in range(query % count):
        rank = (cursor + k) % pcp
        sizes[rank if k < pcp else 2 * pcp - 1 - rank] += 1
    return sizes


def deal(batch: Batch, pcp: int, kind: str, decode: str) -> list[list[Token]]:
    """Tokens of every rank in local order, even chunks."""
    decodes: list[list[Token]] = [[] for _ in range(pcp)]
    prefills: list[list[Token]] = [[] for _ in range(pcp)]
    lens = batch.num_scheduled.tolist()
    flags = batch.is_prefilling.tolist()
    ordinal, first = 0, 0
    cursor = sum(1 for n, f in zip(lens, flags, strict=True) if n and not f) if decode == "owner" else 0
    for request, (query, prefilling) in enumerate(zip(lens, flags, strict=True)):
        if query and not prefilling:
            ranks = range(pcp) if decode == "replicate" else [ordinal % pcp]
            ordinal += 1
            for rank in ranks:
                written = decode == "owner" or rank == 0
                decodes[rank] += [Token(request, j, first + j, written) for j in range(query)]
        elif query and kind == "interleave":
            for j in range(query):
                prefills[(cursor + j) % pcp].append(Token(request, j, first + j, True))
            cursor += query
        elif query:
            j = 0
            for chunk, size in enumerate(chunk_sizes(query, pcp, kind, cursor)):
                rank = chunk if chunk < pcp else 2 * pcp - 1 - chunk
                for _ in range(size):
                    prefills[rank].append(Token(request, j, first + j, True))
                    j += 1
            cursor += query % (2 * pcp if kind == "zigzag" else pcp)
        first += query
    return [a + b for a, b in zip(decodes, prefills, strict=True)]


def runs(tokens: list[Token], kind: str, is_prefilling: Sequence[bool], pcp: int) -> list[tuple[int, int, int]]:
    """Segments ``(request, first global token, length)`` of one rank's tokens."""
    out: list[tuple[int, int, int]] = []
    for token in tokens:
        split = kind == "interleave" and pcp > 1 and is_prefilling[token.request]
        if out and not split and out[-1][0] == token.request and out[-1][1] + out[-1][2] == token.index:
            out[-1] = (out[-1][0], out[-1][1], out[-1][2] + 1)
        else:
            out.append((token.request, token.index, 1))
    return out


def check_identities(layout: Layout) -> None:
    """Both identities, the write mask, pads and balance of operands, from the arrays alone."""
    size = layout.pcp * layout.padded_tokens
    assert layout.gather_index.shape == layout.write_mask.shape == (size,)
    assert layout.gather_index.dtype == layout.restore_index.dtype == np.int64
    assert layout.restore_index.shape == (layout.num_tokens,)
    values = np.arange(layout.num_tokens) * 7 + 3
    if layout.num_tokens:
        assert np.array_equal(values[layout.gather_index][layout.restore_index], values), "restore(gather) != id"
    assert layout.write_mask.sum() == layout.num_tokens, "each token is written once"
    assert np.array_equal(np.sort(layout.gather_index[layout.write_mask]), np.arange(layout.num_tokens))
    assert layout.write_mask[layout.restore_index].all(), "restored from a row that is not written"
    pad = np.arange(layout.padded_tokens)[None] >= layout.per_rank_tokens[:, None]
    assert not layout.write_mask[pad.ravel()].any(), "a pad is written"
    assert not layout.gather_index[pad.ravel()].any(), "a pad reads token 0"


def check_layout(layout: Layout) -> None:
    """``layout`` (even chunks) equals the oracle, token by token."""
    check_identities(layout)
    batch = layout.batch
    ranks = deal(batch, layout.pcp, layout.kind, layout.decode)
    assert layout.per_rank_tokens.tolist() == [len(tokens) for tokens in ranks]
    assert layout.padded_tokens >= max(len(tokens) for tokens in ranks)
    segment = 0
    for rank, tokens in enumerate(ranks):
        first = rank * layout.padded_tokens
        own = slice(first, first + len(tokens))
        assert layout.gather_index[own].tolist() == [t.index for t in tokens]
        assert layout.write_mask[own].tolist() == [t.written for t in tokens]
        expected = runs(tokens, layout.kind, batch.is_prefilling.tolist(), layout.pcp)
        assert layout.rows_per_rank[rank] == len(expected)
        offset = 0
        for request, start, length in expected:
            found = [
                int(a[segment])
                for a in (layout.seg_rank, layout.seg_request, layout.seg_start, layout.seg_length, layout.seg_offset)
            ]
            assert found == [rank, request, start, length, offset]
            offset += length
            segment += 1
        check_rows(layout, rank)
    assert segment == len(layout.seg_rank)


def check_rows(layout: Layout, rank: int) -> None:
    """Every row is causal over its own context, and each token sees its own key."""
    rows = layout.rows(rank)
    batch = layout.batch
    starts = np.concatenate(([0], np.cumsum(batch.num_scheduled)))
    assert rows.num_tokens == layout.per_rank_tokens[rank]
    assert rows.num_rows == max(1, layout.rows_per_rank[rank])
    for row in range(rows.num_rows):
        begin, end = (int(x) for x in rows.query_start_loc[row : row + 2])
        request = int(rows.row_request[row])
        assert end - begin == rows.row_length[row]
        assert rows.seq_lens_host[row] - rows.row_length[row] == rows.row_start[row]
        assert rows.is_prefilling[row] == (rows.row_start[row] < batch.prefill_len[request])
        for local in range(begin, end):
            index = int(layout.gather_index[rank * layout.padded_tokens + local])
            position = int(batch.num_computed[request]) + index - int(starts[request])
            assert starts[request] <= index < starts[request + 1]
            # Bottom-right causal mask: query j of a row sees keys below seq_len - length + j + 1.
            visible = int(rows.seq_lens_host[row]) - (end - begin) + (local - begin) + 1
            assert visible == position + 1, "a token does not see exactly its own prefix and itself"


@dataclass(frozen=True)
class Global:
    """Device tensors of a global batch."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor


def device_batch(batch: Batch, device_computed: Sequence[int] | None = None, groups: int = 1, seed: int = 0) -> Global:
    """Random ids, positions from the *device* cursor, distinct slots per group."""
    rng = np.random.default_rng(seed)
    context = batch.num_computed.tolist() if device_computed is None else list(device_computed)
    positions = [c + j for c, n in zip(context, batch.num_scheduled.tolist(), strict=True) for j in range(n)]
    total = len(positions)
    slots = np.stack([rng.permutation(10 * total + 1)[:total] + 1 for _ in range(groups)])
    return Global(
        torch.from_numpy(rng.integers(1, 1000, total).astype(np.int32)),
        torch.tensor(positions, dtype=torch.int64),
        torch.from_numpy(slots.astype(np.int64)),
    )


def run_plan(plan: StepPlan, layout: Layout, data: Global, padded_rows: int | None = None) -> StepView:
    """One step of one rank."""
    plan.load(layout, padded_rows=padded_rows)
    plan.shard_tokens(data.ids, data.positions)
    plan.expand_slots(data.slots)
    return plan.view()


def check_plan(plan: StepPlan, layout: Layout, data: Global) -> None:
    """The plan's buffers (even chunks) equal the oracle, token by token, and hold nothing of earlier steps."""
    ranks = deal(layout.batch, layout.pcp, layout.kind, layout.decode)
    tokens = ranks[plan.rank]
    view, padded = plan.view(), layout.padded_tokens
    ids, positions = data.ids.tolist(), data.positions.tolist()
    fill = [0] * (padded - len(tokens))
    assert view.input_ids.tolist() == [ids[t.index] for t in tokens] + fill
    assert view.positions.tolist() == [positions[t.index] for t in tokens] + fill
    assert plan.is_padding.tolist() == [i >= len(tokens) for i in range(plan.max_tokens)]
    expected = runs(tokens, layout.kind, layout.batch.is_prefilling.tolist(), layout.pcp)
    lengths = [length for _, _, length in expected] or [0]
    ends = np.cumsum(lengths).tolist()
    rows, num_rows = len(lengths), view.seq_lens.shape[0]
    tail = [len(tokens)] * (plan.max_rows - rows)
    assert plan.query_start_loc.tolist() == [0, *ends, *tail]
    ends_at = [positions[start + length - 1] + 1 for _, start, length in expected] or [0]
    assert plan.seq_lens.tolist() == ends_at + [0] * (plan.max_rows - rows)
    assert view.row_request.tolist() == ([r for r, _, _ in expected] or [0]) + [0] * (num_rows - rows)
    for group, slots in enumerate(data.slots.tolist()):
        wanted = [
            slots[ranks[rank][i].index] if i < len(ranks[rank]) and ranks[rank][i].written else -1
            for rank in range(layout.pcp)
            for i in range(padded)
        ]
        found = plan.slots[group].tolist()
        assert found[: len(wanted)] == wanted
        assert all(slot == -1 for slot in found[len(wanted) :]), "slots of an earlier batch are left behind"
    pad = Token(0, 0, 0, False)
    rows_of = [own + [pad] * (padded - len(own)) for own in ranks]
    rank_major = torch.tensor([ids[t.index] if t.written else -5 for own in rows_of for t in own], dtype=torch.int64)
    assert plan.restore_rows(rank_major).tolist() == ids
