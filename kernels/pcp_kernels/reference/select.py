# SPDX-License-Identifier: Apache-2.0
"""Selection of the best keys of each query row, in tiles of rows and keys that fit a stated workspace.

Rows whose keys are the same run (one request, or one start) share the keys they read. A tile of keys leaves each row's
``topk`` best so far; :func:`pcp_kernels.reference.order.best` of those and the next tile's is exact, because the order
is total. Row counts and run lengths are read on the host: this is the reference, and the fast path of CPUs only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from pcp_kernels.reference.cache import gather_pages, page_size
from pcp_kernels.reference.order import best, emit, merge, no_key, sortable_key
from pcp_kernels.reference.score import tile_scores

__all__ = ["DEFAULT_WORKSPACE_BYTES", "Tiles", "merge", "plan_tiles", "select_scores", "topk_paged", "topk_rows"]

DEFAULT_WORKSPACE_BYTES = 64 << 20
"""Temporaries of a selection, unless told otherwise."""

_FAST_BYTES = 16 << 20
"""A tile above this leaves the caches of a CPU and is slower than two; room that is not used costs nothing."""

Fetch = Callable[[int, int], tuple[torch.Tensor, torch.Tensor | None]]
"""Keys ``[stop - start, D]`` and scales ``[stop - start]`` of a run, fp64, from its keys ``start`` to ``stop``."""


@dataclass(frozen=True)
class Tiles:
    """Query rows and keys that are scored at once."""

    rows: int
    keys: int


@lru_cache(maxsize=1024)
def plan_tiles(workspace_bytes: int, *, heads: int, dim: int, topk: int, rows: int, keys: int, page: int = 1) -> Tiles:
    """Tiles of which every temporary together stays within ``workspace_bytes``; ``keys`` is a multiple of ``page``.

    Raises:
        ValueError: not even one row and one page fit; says how much would.
    """
    key_bytes = 12 * dim + 32  # gathered, widened to fp64, and its scale
    row_bytes = 8 * heads * (dim + 2) + 96 * topk  # widened queries and weights; two sets of candidates
    pair_bytes = 8 * heads + 40  # a product per head; then score, key and packed candidate

    def needed(tile_rows: int, tile_keys: int) -> int:
        return tile_keys * key_bytes + tile_rows * (row_bytes + tile_keys * pair_bytes) + 4096

    least = needed(1, page)
    if workspace_bytes < least:
        raise ValueError(
            f"selection of {topk} keys: found a workspace of {workspace_bytes} bytes; one query of {heads} heads of "
            f"{dim} and one page of {page} keys take {least}. Give at least that much."
        )
    budget = max(least, min(workspace_bytes, _FAST_BYTES))
    wanted = -(-max(keys, 1) // page)
    # Every tile of rows reads its keys again: as many keys as there is room for with rows enough to be worth it.
    few = min(rows, max(8, 128 // heads))
    pages = max(1, (budget - 4096 - few * row_bytes) // ((key_bytes + few * pair_bytes) * page))
    tile_keys = -(-wanted // -(-wanted // pages)) * page
    tile_rows = (budget - 4096 - tile_keys * key_bytes) // (row_bytes + tile_keys * pair_bytes)
    return Tiles(min(max(rows, 1), tile_rows), tile_keys) if tile_rows > 0 else Tiles(1, page)


def topk_rows(
    q: torch.Tensor,
    w: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor | None,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    *,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """i32 ``[T, topk]``: for each row the best of keys ``ks`` to ``ke``, relative to ``ks``; the package's contract.

    Args:
        q: ``[T, H, D]`` of any floating dtype; fp64 is scored in fp64.
        w: ``[T, H]``.
        k: ``[N, D]``.
        k_scale: ``[N]`` or None.
        ks, ke: integers ``[T]``, each clamped to ``[0, N]``; ``ke <= ks`` is an empty row. Rows of equal ``ks`` are
            best kept together.
        workspace_bytes: bound of all temporaries together; the result does not depend on it.

    Raises:
        ValueError: arguments that do not fit together, or a workspace that one row does not fit.
    """
    _check(q, w, topk, workspace_bytes, ks=ks, ke=ke)
    if k.ndim != 2 or k.shape[1] != q.shape[2] or (k_scale is not None and k_scale.shape != k.shape[:1]):
        found = f"keys {list(k.shape)} and scales {None if k_scale is None else list(k_scale.shape)}"
        raise ValueError(f"topk_rows: found {found} for queries {list(q.shape)}; required [N, D] and [N] or None.")
    ks = ks.to(torch.int64).clamp(0, k.shape[0])
    counts = (ke.to(torch.int64).clamp(0, k.shape[0]) - ks).clamp_(min=0)

    def fetch_from(first: int) -> Fetch:
        def fetch(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            held = slice(first + start, first + stop)
            return k[held].to(torch.float64), None if k_scale is None else k_scale[held].to(torch.float64)

        return fetch

    return _by_runs(q, w, counts, ks, fetch_from, topk, 1, workspace_bytes)


def topk_paged(
    q: torch.Tensor,
    w: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    row_request: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    page: int,
    *,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """i32 ``[T, topk]``: for each row the best of its request's keys 0 to ``ke``; the package's contract.

    Args:
        q: ``[T, H, D]`` of any floating dtype; fp64 is scored in fp64.
        w: ``[T, H]``.
        cache: u8 ``[pages, page * (D + 4)]`` (FP8) or ``[pages, page, D]``.
        block_table: integers ``[R, nb]``, the pages of each request; entries past its keys are not read.
        row_request: integers ``[T]``; negative is no request, which has no keys. Rows of one request are best kept
            together.
        ke: integers ``[T]``, position + 1, and 0 for a row of padding (whose request is not read); clamped to
            ``[0, nb * page]``.
        workspace_bytes: bound of all temporaries together; the result does not depend on it.

    Raises:
        ValueError: arguments that do not fit together, a workspace that one row and one page do not fit, keys of a
            request past the table, or of a page past the cache.
    """
    _check(q, w, topk, workspace_bytes, row_request=row_request, ke=ke)
    dim = q.shape[2]
    if cache.ndim == 3 and not cache.dtype.is_floating_point:
        raise ValueError(
            f"topk_paged: found a cache {cache.dtype} {list(cache.shape)}; required floating keys [pages, page, {dim}] "
            f"or u8 [pages, page * {dim + 4}] of FP8 keys."
        )
    if page_size(cache, dim) != page or block_table.ndim != 2:
        raise ValueError(
            f"topk_paged: found pages of {page_size(cache, dim)} keys and a block table {list(block_table.shape)}; "
            f"required pages of {page} and [requests, pages]."
        )
    counts = ke.to(torch.int64).clamp(0, block_table.shape[1] * page).masked_fill_(row_request < 0, 0)
    require_requests(row_request, counts, block_table.shape[0])

    def fetch_from(request: int) -> Fetch:
        def fetch(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            pages = block_table[request, start // page : -(-stop // page)]
            require_pages(pages, cache.shape[0], request)
            keys, scale = gather_pages(cache, pages, dim)
            held = keys.to(torch.float64).flatten(0, 1)[: stop - start]
            return held, None if scale is None else scale.to(torch.float64).flatten()[: stop - start]

        return fetch

    return _by_runs(q, w, counts, row_request, fetch_from, topk, page, workspace_bytes)


def select_scores(
    scores: torch.Tensor, n_valid: torch.Tensor, topk: int, *, workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
) -> torch.Tensor:
    """i32 ``[n, topk]``: the best of the first ``n_valid`` scores of each row ``[n, S]``, fp32 or fp64."""
    held = torch.arange(scores.shape[1], device=scores.device)
    step = max(1, workspace_bytes // (40 * scores.shape[1] + 96 * topk + 1))
    out = scores.new_empty((scores.shape[0], topk), dtype=torch.int32)
    for first in range(0, scores.shape[0], step):
        rows = slice(first, first + step)
        keys = _masked_keys(scores[rows], held, n_valid[rows])
        out[rows] = emit(*best(keys, held, topk), topk)
    return out


def _by_runs(
    q: torch.Tensor,
    w: torch.Tensor,
    counts: torch.Tensor,
    source: torch.Tensor,
    fetch_from: Callable[[int], Fetch],
    topk: int,
    page: int,
    workspace_bytes: int,
) -> torch.Tensor:
    """Rows of one ``source`` and next to each other at a time; ``counts`` i64 ``[T]`` are the keys of each row."""
    out = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    sources: list[int] = source.tolist()
    lengths: list[int] = counts.tolist()
    start = 0
    while start < len(sources):
        stop = start + 1
        while stop < len(sources) and sources[stop] == sources[start]:
            stop += 1
        longest = max(lengths[start:stop])
        if longest <= topk:
            _select_all(out[start:stop], counts[start:stop], longest, workspace_bytes)
            start = stop
            continue
        fetch = fetch_from(sources[start])
        tiles = plan_tiles(
            workspace_bytes, heads=q.shape[1], dim=q.shape[2], topk=topk, rows=stop - start, keys=longest, page=page
        )
        for first in range(start, stop, tiles.rows):
            last = min(first + tiles.rows, stop)
            longest = max(lengths[first:last])
            if longest <= topk:
                _select_all(out[first:last], counts[first:last], longest, workspace_bytes)
            else:
                out[first:last] = _tile(q[first:last], w[first:last], counts[first:last], fetch, topk, longest, tiles)
        start = stop
    return out


def _select_all(out: torch.Tensor, counts: torch.Tensor, longest: int, workspace_bytes: int) -> None:
    """Rows that see ``longest <= topk`` keys at most select each of them, whatever it scores."""
    every = torch.arange(longest, dtype=torch.int32, device=out.device)
    step = max(1, workspace_bytes // (16 * longest + 16))
    for first in range(0, out.shape[0] if longest else 0, step):
        rows = slice(first, first + step)
        out[rows, :longest] = torch.where(every < counts[rows, None], every, -1)


def _tile(
    q: torch.Tensor, w: torch.Tensor, counts: torch.Tensor, fetch: Fetch, topk: int, longest: int, tiles: Tiles
) -> torch.Tensor:
    kept: tuple[torch.Tensor, torch.Tensor] | None = None
    for start in range(0, longest, tiles.keys):
        stop = min(start + tiles.keys, longest)
        held = torch.arange(start, stop, device=q.device)
        scores, numbers = tile_scores(q, w, *fetch(start, stop))
        found = best(_masked_keys(scores, held, counts, numbers=numbers), held, topk)
        if kept is not None:
            found = best(torch.cat((kept[0], found[0]), dim=1), torch.cat((kept[1], found[1]), dim=1), topk)
        kept = found
    assert kept is not None, "a tile has keys"
    return emit(*kept, topk)


def _masked_keys(
    scores: torch.Tensor, held: torch.Tensor, counts: torch.Tensor, *, numbers: bool = False
) -> torch.Tensor:
    keys = sortable_key(scores, numbers=numbers)
    return keys.masked_fill_(held >= counts[:, None], no_key(keys.dtype))


def require_requests(row_request: torch.Tensor, counts: torch.Tensor, requests: int) -> None:
    """Refuse rows with keys, ``counts`` above 0, of a request that the block table does not have.

    Raises:
        ValueError: names the first such row.
    """
    wrong = (row_request >= requests) & (counts > 0)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"topk_paged: row_request: found {int(row_request[row])} in row {row}; required below {requests}, the "
            "requests of the block table, or negative for a row without keys."
        )


def require_pages(pages: torch.Tensor, held: int, request: int) -> None:
    """Refuse page numbers that the cache does not have.

    Raises:
        ValueError: names one.
    """
    low, high = (int(one) for one in pages.aminmax())
    if low < 0 or high >= held:
        raise ValueError(
            f"topk_paged: block_table: found page {low if low < 0 else high} among the keys of request {request}; "
            f"required 0 to {held - 1}, the pages of the cache."
        )


def _check(q: torch.Tensor, w: torch.Tensor, topk: int, workspace_bytes: int, **rows: torch.Tensor) -> None:
    faults = []
    if q.ndim != 3 or w.shape != q.shape[:2]:
        faults.append(f"found queries {list(q.shape)} and weights {list(w.shape)}; required [T, H, D] and [T, H]")
    for name, tensor in rows.items():
        if tensor.shape != q.shape[:1] or tensor.dtype not in (torch.int32, torch.int64):
            faults.append(f"{name}: found {tensor.dtype} {list(tensor.shape)}; required i32 or i64 [{q.shape[0]}]")
    if topk < 1:
        faults.append(f"topk: found {topk}; required at least 1")
    if workspace_bytes < 0:
        faults.append(f"workspace_bytes: found {workspace_bytes}; required at least 0, and what the selection takes")
    if faults:
        raise ValueError("\n  ".join(["the selection cannot run:", *faults]))
