# SPDX-License-Identifier: Apache-2.0
"""Random sparse-index runs: requests that arrive in chunks, on P ranks, into pages; and single calls of kernels."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from pcp_kernels.ops import launch
from pcp_kernels.ops.index import index_prep, index_remap, index_scatter, select_owner_rows
from pcp_kernels.ops.mla import sparse_mla
from pcp_kernels.ops.records import index_pack, latent_pack
from pcp_kernels.ops.topk import index_topk_paged, select_paged, select_rows
from pcp_passes.layout import Batch, build_layout
from pcp_passes.layout.result import Layout

EPS = 1e-6


@dataclass(frozen=True)
class Prompt:
    """What arrives at the indexers of a few requests, and their sizes; equal for every way to run it."""

    lengths: tuple[int, ...]
    k: torch.Tensor
    """``[requests, longest, D]``, projected."""
    q: torch.Tensor
    """``[requests, longest, H, D]``."""
    w: torch.Tensor
    """``[requests, longest, H]``."""
    norm: tuple[torch.Tensor, torch.Tensor]
    rope: str
    store: str
    hadamard: bool
    topk: int


@dataclass(frozen=True)
class Way:
    """One way to run a prompt; the result does not depend on it."""

    pcp: int = 1
    layout: str = "zigzag"
    decode: str = "replicate"
    chunk: int = 1 << 20
    """Most tokens of a request in a step."""
    page: int = 64
    workspace: int = 64 << 20
    spare: int = 0
    """Rows of padding on every rank beside those that the layout needs."""
    seed: int = 0
    """Of the order of pages."""


def make_prompt(seed: int) -> Prompt:
    """Requests of 1 to 200 tokens; every third prompt of small integers, every fifth with heads that score nothing."""
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    heads, dim = draw.choice([1, 2, 4, 8]), draw.choice([16, 32, 64])
    lengths = tuple(draw.choice([1, 2, 7, 40, 120, 200]) for _ in range(draw.randint(1, 4)))
    longest = max(lengths)

    def made(*shape: int) -> torch.Tensor:
        if seed % 3 == 0:
            return torch.randint(-2, 3, shape, generator=generator).float()
        return torch.randn(*shape, generator=generator).bfloat16().float()

    w = made(len(lengths), longest, heads)
    if seed % 5 == 0:
        w[:, :, : heads // 2 + 1] = 0
    return Prompt(
        lengths=lengths, k=made(len(lengths), longest, dim), q=made(len(lengths), longest, heads, dim), w=w,
        norm=(made(dim) + 1, made(dim)), rope=draw.choice(["interleaved", "half", "none"]),
        store=draw.choice(["fp8", "bf16", "fp16", "fp32"]), hadamard=draw.random() < 0.5,
        topk=draw.choice([1, 5, 16, 48]),
    )  # fmt: skip


def make_way(seed: int) -> Way:
    draw = random.Random(seed)
    return Way(
        pcp=draw.choice([1, 2, 3, 4, 8]), layout=draw.choice(["zigzag", "interleave", "contiguous"]),
        decode=draw.choice(["replicate", "owner"]), chunk=draw.choice([1, 3, 17, 64, 1 << 20]),
        page=draw.choice([16, 32, 64]), workspace=draw.choice([1 << 20, 64 << 20]), spare=draw.choice([0, 0, 1, 5]),
        seed=seed,
    )  # fmt: skip


def run(prompt: Prompt, way: Way) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each request the selections i32 ``[length, topk]`` and the cached records ``[length, width]``."""
    requests = len(prompt.lengths)
    columns = -(-max(prompt.lengths) // way.page)
    pages = torch.randperm(requests * columns, generator=torch.Generator().manual_seed(way.seed))
    table = pages.view(requests, columns).int()
    cache: torch.Tensor | None = None
    selected = [torch.full((n, prompt.topk), -2, dtype=torch.int32) for n in prompt.lengths]
    kept: list[list[torch.Tensor]] = [[] for _ in prompt.lengths]
    done = [0] * requests
    while any(at < n for at, n in zip(done, prompt.lengths, strict=True)):
        step = [min(way.chunk, n - at) for at, n in zip(done, prompt.lengths, strict=True)]
        layout = _layout(step, done, prompt.lengths, way)
        request = torch.repeat_interleave(torch.arange(requests), torch.tensor(step))
        position = torch.cat([torch.arange(at, at + n) for at, n in zip(done, step, strict=True)])
        mine = [torch.from_numpy(rows) for rows in layout.gather_index.reshape(way.pcp, -1)]
        records = torch.cat([_records(prompt, request[rows], position[rows]) for rows in mine])
        slots = table[request, position // way.page].long() * way.page + position % way.page
        slots = slots[torch.cat(mine)].where(torch.from_numpy(layout.write_mask), -1)
        if cache is None:
            flat, count = records.dtype == torch.uint8, len(pages)
            shape = (count, way.page * records.shape[1]) if flat else (count, way.page, records.shape[1])
            cache = records.new_full(shape, 3)
        index_scatter(cache, records, slots)
        real = torch.from_numpy(layout.per_rank_tokens)
        found = [
            _select(prompt, way, request, position, rows, int(n), cache, table)
            for rows, n in zip(mine, real, strict=True)
        ]
        restored = torch.from_numpy(layout.restore_index)
        in_order, stored = torch.cat(found)[restored], records[restored]
        for number in range(requests):
            rows = request == number
            selected[number][position[rows]] = in_order[rows]
            kept[number].append(stored[rows])
        done = [at + n for at, n in zip(done, step, strict=True)]
    return [(rows, torch.cat(parts)) for rows, parts in zip(selected, kept, strict=True)]


def _layout(step: list[int], done: list[int], lengths: tuple[int, ...], way: Way) -> Layout:
    batch = Batch(step, done, list(lengths))
    least = build_layout(batch, way.pcp, kind=way.layout, decode=way.decode)
    rows = least.padded_tokens + way.spare
    return build_layout(batch, way.pcp, kind=way.layout, decode=way.decode, padded_tokens=rows)


def _angles(prompt: Prompt, position: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if prompt.rope == "none":
        return None, None
    angles = position[:, None] / torch.logspace(0, 2, 4)
    return angles.cos(), angles.sin()


def _records(prompt: Prompt, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    return index_pack(
        prompt.k[request, position], *prompt.norm, EPS, *_angles(prompt, position), rope=prompt.rope,
        hadamard=prompt.hadamard, store=prompt.store,
    )  # fmt: skip


def _select(
    prompt: Prompt, way: Way, request: torch.Tensor, position: torch.Tensor, rows: torch.Tensor, real: int,
    cache: torch.Tensor, table: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """One rank's rows; those from ``real`` on are padding."""
    request, position = request[rows], position[rows]
    q, w = index_prep(
        prompt.q[request, position], prompt.w[request, position], *_angles(prompt, position), rope=prompt.rope,
        hadamard=prompt.hadamard, store=prompt.store, factor=0.25,
    )  # fmt: skip
    ke = (position + 1).masked_fill(torch.arange(len(rows)) >= real, 0).int()
    return index_topk_paged(q, w, cache, table, request.int(), ke, prompt.topk, way.page, way.workspace)


def one_selection(seed: int, kind: str | None) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """(selection, valid counts, what it was of) of one random call; by the generated kernels if ``kind`` is named.

    Integers of small size: every sum is exact in any order, so the kernels and the reference agree bit for bit.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, dim, topk = draw.choice([2, 4, 8]), draw.choice([32, 64]), draw.choice([16, 32, 48, 64])
    rows, keys, page = draw.randint(1, 20), draw.randint(topk + 1, 500), draw.choice([16, 32, 64])
    store, paged = draw.choice(["fp8", "bf16", "fp16", "fp32"]), draw.random() < 0.6

    def integers(reach: int, *shape: int) -> torch.Tensor:
        return torch.randint(-reach, reach + 1, shape, generator=generator).float()

    reach = draw.choice([0, 1, 2, 4])
    q, k = (integers(reach, *shape).to(launch.DTYPES[store]) for shape in ((rows, heads, dim), (2 * keys, dim)))
    w = integers(2, rows, heads)
    w[integers(9, rows) > 8] = float("nan")
    scale = torch.exp2(integers(2, 2 * keys)) if store == "fp8" else None
    request = (torch.arange(rows) * 2 // rows).int()
    ke = torch.randint(0, keys + 1, (rows,), generator=generator).int()
    workspace = 64 << 20
    if not paged:
        ks = (request * keys).int()
        given = (q, w, k, scale, ks, (ks + ke).int(), topk, workspace)
        return select_rows(*given, kind=kind), ke, (q, w, k, scale, ks, (ks + ke).int(), topk)
    columns = -(-keys // page)
    table = torch.randperm(2 * columns, generator=generator).view(2, columns).int()
    slot = torch.arange(2 * keys)
    slots = table[slot // keys, slot % keys // page].long() * page + slot % keys % page
    if scale is None:
        record, cache = k, k.new_zeros(2 * columns, page, dim)
    else:
        record = torch.cat([k.view(torch.uint8), scale[:, None].view(torch.uint8)], 1)
        cache = torch.zeros(2 * columns, page * (dim + 4), dtype=torch.uint8)
    index_scatter(cache, record, slots)
    held = (q, w, cache, table, request, ke, topk, page)
    return select_paged(*held, workspace, kind=kind), ke, held


def one_of_each(seed: int) -> dict[str, tuple[torch.Tensor, ...]]:
    """Every operator that is no selection, once, on random sizes: what runs it depends on the process."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, heads, dim = draw.randint(1, 20), draw.choice([2, 4, 8]), draw.choice([32, 64, 128])
    rope, store = draw.choice(["interleaved", "half", "none"]), draw.choice(["fp8", "bf16", "fp16", "fp32"])
    source = launch.DTYPES[draw.choice(["bf16", "fp16", "fp32"])]
    rope_dim, latent, page, topk = draw.choice([8, 16, 32]), draw.choice([32, 64, 128, 256]), 32, draw.choice([16, 48])

    def made(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 2.0 ** draw.randint(-3, 3)).to(source)

    angles = torch.rand(tokens, rope_dim // 2, generator=generator) * 6.28
    turned = (angles.cos(), angles.sin()) if rope != "none" else (None, None)
    named = {"rope": rope, "hadamard": draw.random() < 0.5, "store": store}
    record = index_pack(made(tokens, dim), None, None, EPS, *turned, rounding=draw.choice(["bf16", "fp32"]), **named)
    held = 2 * tokens // page + 1
    shape = (held, page * record.shape[1]) if store == "fp8" else (held, page, record.shape[1])
    cache = record.new_full(shape, 3)
    slots = torch.randperm(held * page, generator=generator)[:tokens]
    slots[torch.rand(tokens, generator=generator) < 0.3] = -1
    index_scatter(cache, record, slots)
    indices = torch.randint(-1, 96, (tokens, topk), generator=generator).int()
    table = torch.randperm(9, generator=generator).view(3, 3).int()
    request = torch.randint(0, 3, (tokens,), generator=generator).int()
    owners = torch.randint(-1, tokens, (5,), generator=generator)
    q = made(tokens, 16, latent + rope_dim)
    rows = made(60, latent + rope_dim)
    return {
        "pack": (record,),
        "scatter": (cache,),
        "latent": (latent_pack(made(tokens, latent), made(tokens, rope_dim), store=store),),
        "prep": index_prep(made(tokens, heads, dim), made(tokens, heads), *turned, factor=0.3, **named),
        "remap": index_remap(indices, table, request, page),
        "owner": (select_owner_rows(indices, owners),),
        "mla": sparse_mla(q, rows[:, :latent], rows[:, latent:], indices.clamp(max=59), latent**-0.5),
    }
