# SPDX-License-Identifier: Apache-2.0
"""The paged ops against dense formulas, ragged requests in shuffled blocks; and what they refuse."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pcp_passes.attention.reference import attend_reference
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.paged import (
    AttentionInputs,
    PagedCaches,
    index_topk,
    index_write,
    kv_attend,
    kv_write,
    mla_attend,
    running,
)

SIZE = 4
LENGTHS = (19, 3, 8, 26)
NEW = (6, 3, 1, 26)
HEADS, KV_HEADS, D, DV = 4, 2, 8, 6
LATENT, ROPE = 10, 4


class World:
    """All keys of four requests are written in one call; the last ``NEW`` rows of each then attend in another."""

    def __init__(self, padding: int = 3) -> None:
        generator = torch.Generator().manual_seed(0)
        needed = [-(-length // SIZE) for length in LENGTHS]
        self.tables = torch.full((len(LENGTHS), max(needed)), -1, dtype=torch.int32)
        order = torch.randperm(sum(needed) + 2, generator=generator)
        for request, blocks in enumerate(order[: sum(needed)].split(needed)):
            self.tables[request, : len(blocks)] = blocks.int()
        self.caches = PagedCaches(sum(needed) + 2, SIZE, torch.float64)
        self.write = self._inputs(LENGTHS, 0)
        self.read = self._inputs(NEW, padding)
        self.generator = generator

    def _inputs(self, rows: tuple[int, ...], padding: int) -> AttentionInputs:
        spans = [(length - count, length) for length, count in zip(LENGTHS, rows, strict=True)]
        positions = torch.cat([torch.arange(a, b) for a, b in spans])
        row = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
        slots = self.tables[row, positions // SIZE].long() * SIZE + positions % SIZE
        return AttentionInputs(
            slots=torch.nn.functional.pad(slots, (0, padding), value=-1),
            slot_layout="replicated",
            block_tables=self.tables,
            query_start_loc=torch.tensor([0, *rows]).cumsum(0),
            seq_lens=torch.tensor(LENGTHS),
            positions=torch.nn.functional.pad(positions, (0, padding)),
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def requests(self, q: torch.Tensor, keys: torch.Tensor) -> Any:
        """``(rows, their queries, their positions, keys of the request)`` for each request."""
        start = key = 0
        for length, count in zip(LENGTHS, NEW, strict=True):
            rows = slice(start, start + count)
            yield rows, q[rows], self.read.positions[rows], keys[key : key + length]
            start, key = start + count, key + length


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 0.3, "left": 4},
    {"chunk": 5},
    {"right": -1},
    {"softcap": 2.0},
    {"sinks": torch.ones(HEADS, dtype=torch.float64), "left": 2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=[",".join(o) or "causal" for o in OPTIONS])
def test_kv_attend(options: dict[str, Any]) -> None:
    world = World()
    k, v = world.random(sum(LENGTHS), KV_HEADS, D), world.random(sum(LENGTHS), KV_HEADS, DV)
    q = world.random(len(world.read.positions), HEADS, D)
    with running(world.caches, world.write):
        dep = kv_write(k, v, "l")
    with running(world.caches, world.read):
        found = kv_attend(q, dep, "l", value_size=DV, **options)
    for rows, queries, positions, kv in world.requests(q, torch.cat([k, v], dim=2)):
        expected = attend_reference(
            queries.transpose(0, 1)[None], kv[..., :D].transpose(0, 1)[None], kv[..., D:].transpose(0, 1)[None],
            positions, **{"scale": D**-0.5, **options},
        )  # fmt: skip
        torch.testing.assert_close(found[rows], expected[0].transpose(0, 1), rtol=0, atol=1e-12)
    assert not found[sum(NEW) :].any()


def _latent(world: World, indices: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = world.random(sum(LENGTHS), 1, LATENT + ROPE)
    q = world.random(len(world.read.positions), HEADS, LATENT + ROPE)
    with running(world.caches, world.write):
        dep = kv_write(keys[..., :LATENT], keys[..., LATENT:], "l")
    with running(world.caches, world.read):
        return q, keys, mla_attend(q, dep, "l", scale=0.4, latent=LATENT, indices=indices)


@pytest.mark.parametrize("sparse", [False, True])
def test_mla_attend(sparse: bool) -> None:
    world = World()
    chosen = torch.full((len(world.read.positions), 5), -1, dtype=torch.int32)
    for row, position in enumerate(world.read.positions.tolist()):
        some = torch.randperm(position + 1, generator=world.generator)[:5]
        chosen[row, : len(some)] = some.int()
    chosen[0] = -1  # a row without any key
    q, keys, found = _latent(world, chosen if sparse else None)
    for rows, queries, positions, held in world.requests(q, keys[:, 0]):
        logits = torch.einsum("nhd,sd->nhs", queries, held) * 0.4
        seen = torch.arange(len(held)) <= positions[:, None]
        if sparse:
            seen = torch.stack([torch.isin(torch.arange(len(held)), one) for one in chosen[rows]])
        weights = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1).nan_to_num(0.0)
        torch.testing.assert_close(found[rows], weights @ held[:, :LATENT], rtol=0, atol=1e-12)
    assert not found[sum(NEW) :].any()
    if sparse:
        assert not found[0].any()


def _stable(scores: torch.Tensor, positions: torch.Tensor, topk: int) -> list[list[int]]:
    rows = []
    for row, position in zip(scores.tolist(), positions.tolist(), strict=True):
        order = sorted(range(position + 1), key=lambda j: (-row[j], j))[:topk]
        rows.append(sorted(order) + [-1] * (topk - len(order)))
    return rows


@pytest.mark.parametrize("topk", [1, 5, 30])
def test_index_topk(topk: int) -> None:
    world = World()
    keys = world.random(sum(LENGTHS), D)
    q, weights = world.random(len(world.read.positions), 2, D), world.random(len(world.read.positions), 2)
    with running(world.caches, world.write):
        dep = index_write(keys, "l")
    with running(world.caches, world.read):
        found = index_topk(q, weights, dep, "l", topk)
    assert found.dtype == torch.int32 and found.shape == (len(q), topk)
    for rows, queries, positions, held in world.requests(q, keys):
        scores = (torch.relu(torch.einsum("nhd,sd->nhs", queries, held)) * weights[rows][..., None]).sum(1)
        assert found[rows].tolist() == _stable(scores, positions, topk)
    assert (found[sum(NEW) :] == -1).all()


def test_ties_go_to_the_lower_position() -> None:
    world = World()
    keys = torch.randint(-1, 2, (sum(LENGTHS), D), generator=world.generator).double()
    q = torch.randint(-1, 2, (len(world.read.positions), 2, D), generator=world.generator).double()
    with running(world.caches, world.write):
        dep = index_write(keys, "l")
    with running(world.caches, world.read):
        found = index_topk(q, q[..., 0], dep, "l", 5)
    flipped = []
    for rows, queries, positions, held in world.requests(q, keys):
        scores = (torch.relu(torch.einsum("nhd,sd->nhs", queries, held)) * q[rows][..., :1]).sum(1)
        assert found[rows].tolist() == _stable(scores, positions, 5)
        # The same selection with ties to the higher position is another one: the scores do hold ties.
        high = [sorted(range(p + 1), key=lambda j: (-row[j], -j))[:5]
                for row, p in zip(scores.tolist(), positions.tolist(), strict=True)]  # fmt: skip
        flipped.append([sorted(one) + [-1] * (5 - len(one)) for one in high] != found[rows].tolist())
    assert any(flipped)


def test_a_window_does_not_gather_what_it_cannot_see() -> None:
    """A NaN out of sight of every row changes nothing."""
    world = World()
    k, v = world.random(sum(LENGTHS), KV_HEADS, D), world.random(sum(LENGTHS), KV_HEADS, D)
    q = world.random(len(world.read.positions), HEADS, D)
    with running(world.caches, world.write):
        dep = kv_write(k, v, "l")
    with running(world.caches, world.read):
        clean = kv_attend(q, dep, "l", left=2)
    for name in ("l.k", "l.v"):
        world.caches.tensors[name].flatten(0, 1)[world.write.slots[:10]] = float("nan")
    with running(world.caches, world.read):
        assert torch.equal(kv_attend(q, dep, "l", left=2), clean)
        assert kv_attend(q, dep, "l").isnan().any()


def test_caches_are_made_once_with_zeros() -> None:
    world = World()
    rows = world.random(sum(LENGTHS), KV_HEADS, D)
    with running(world.caches, world.write):
        kv_write(rows, rows, "l")
        address = world.caches.tensors["l.k"].data_ptr()
        kv_write(rows, rows, "l")
    held = world.caches.tensors["l.k"]
    assert held.data_ptr() == address and held.shape == (world.caches.num_blocks, SIZE, KV_HEADS, D)
    mine = torch.zeros(world.caches.num_blocks * SIZE, dtype=torch.bool)
    mine[world.write.slots] = True
    assert torch.equal(held.flatten(0, 1)[world.write.slots], rows) and not held.flatten(0, 1)[~mine].any()
    assert world.caches.bytes_per_block == 2 * SIZE * KV_HEADS * D * 8


def test_a_write_of_the_other_layout_is_an_error() -> None:
    """Even where the counts agree, as they do for one rank, or by accident of padding."""
    world = World()
    rows = torch.zeros(sum(LENGTHS), KV_HEADS, D)
    with running(world.caches, world.write), pytest.raises(ConfigError, match=r"rank_major rows .* replicated slots"):
        kv_write(rows, rows, "l", "rank_major")
    with running(world.caches, replace(world.write, slot_layout="rank_major")):
        kv_write(rows, rows, "l", "rank_major")
        with pytest.raises(ConfigError, match=r"replicated rows .* rank_major slots"):
            index_write(rows[:, 0], "l")
        with pytest.raises(ConfigError, match="found 5 rank_major rows"):
            kv_write(rows[:5], rows[:5], "l", "rank_major")


def test_calls_nest_and_need_a_step() -> None:
    one, two = World(), World()
    rows = torch.ones(sum(LENGTHS), KV_HEADS, D)
    with running(one.caches, one.write):
        with running(two.caches, two.write):
            kv_write(rows, rows, "inner")
        kv_write(rows, rows, "outer")
    assert list(two.caches.tensors) == ["inner.k", "inner.v"] and list(one.caches.tensors) == ["outer.k", "outer.v"]
    with pytest.raises(PcpError, match="outside a step"):
        kv_write(rows, rows, "l")


def test_reading_what_nobody_wrote_is_an_error() -> None:
    world = World()
    with running(world.caches, world.read), pytest.raises(PcpError, match=r"'l.k' is read before it was written"):
        kv_attend(torch.zeros(len(world.read.positions), HEADS, D), torch.zeros(0), "l")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"slots is torch.int32\[3\]"),
        ({"positions": torch.zeros(3)}, "positions is torch.float32"),
        ({"query_start_loc": torch.zeros(3, dtype=torch.int64)}, r"required integer \[5\]"),
        ({"block_tables": torch.zeros(2, 4, dtype=torch.int64)}, r"required integer \[4, B\]"),
        ({"slot_layout": "sharded"}, "slot_layout is 'sharded'"),
    ],
)
def test_inputs_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(World().read, **change)


def test_sequences_that_do_not_fit() -> None:
    world = World()
    rows = torch.zeros(sum(LENGTHS), KV_HEADS, D, dtype=torch.float64)
    q = torch.zeros(len(world.read.positions), HEADS, D, dtype=torch.float64)
    with running(world.caches, world.write):
        dep = kv_write(rows, rows, "l")
    long = replace(world.read, seq_lens=world.read.seq_lens + 40)
    with running(world.caches, long), pytest.raises(ConfigError, match="more columns"):
        kv_attend(q, dep, "l")
    back = replace(world.read, query_start_loc=torch.tensor([0, 9, 6, 10, 36]))
    with running(world.caches, back), pytest.raises(ConfigError, match="required a rise from 0"):
        kv_attend(q, dep, "l")
    with running(world.caches, world.read), pytest.raises(ConfigError, match="attention inputs of 39 rows"):
        kv_attend(q[:5], dep, "l")
    with running(world.caches, world.read), pytest.raises(ConfigError, match="required one head size"):
        kv_attend(q[..., :4], dep, "l")


def test_rows_of_another_shape_do_not_fit_a_cache() -> None:
    world = World()
    rows = torch.zeros(sum(LENGTHS), KV_HEADS, D)
    with running(world.caches, world.write):
        kv_write(rows, rows, "l")
        with pytest.raises(ConfigError, match=r"l.k: found rows"):
            kv_write(rows[..., :3], rows, "l")
        with pytest.raises(ConfigError, match="at least one of each"):
            PagedCaches(0, 4)
