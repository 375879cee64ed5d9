# SPDX-License-Identifier: Apache-2.0
"""Build a layout, or only its largest rank-local token count."""

from __future__ import annotations

import numpy as np

from pcp_passes.errors import ConfigError, LayoutError
from pcp_passes.layout.batch import Batch, counting
from pcp_passes.layout.partition import cut, first_remainder_rank, vllm_chunks
from pcp_passes.layout.result import Layout

KINDS = ("zigzag", "interleave", "contiguous")
DECODES = ("replicate", "owner")


def check_options(pcp: int, kind: str, decode: str, compat: str | None, dcp: int) -> None:
    """Refuse what cannot run, one sentence each. Raises ConfigError."""
    if isinstance(pcp, bool) or not isinstance(pcp, (int, np.integer)) or pcp < 1:
        raise ConfigError(f"pcp is the number of ranks, an integer of at least 1; found {pcp!r}.")
    if kind not in KINDS:
        raise ConfigError(f"layout is one of {', '.join(KINDS)}; found {kind!r}.")
    if decode not in DECODES:
        raise ConfigError(f"decode is one of {', '.join(DECODES)}; found {decode!r}.")
    if compat not in (None, "vllm"):
        raise ConfigError(f"compat is None or 'vllm'; found {compat!r}.")
    if compat == "vllm" and kind != "zigzag":
        raise ConfigError(f"compat='vllm' knows the zigzag layout only; found {kind!r}.")
    if dcp != 1:
        raise ConfigError(
            f"Decode context parallelism (dcp={dcp!r}) is not supported; the field is reserved: set dcp=1."
        )


def build_layout(
    batch: Batch,
    pcp: int,
    *,
    kind: str = "zigzag",
    decode: str = "replicate",
    compat: str | None = None,
    dcp: int = 1,
    padded_tokens: int | None = None,
) -> Layout:
    """Lay ``batch`` out over ``pcp`` ranks.

    Args:
        kind: "zigzag", "interleave" or "contiguous", see :mod:`pcp_passes.layout.partition`.
        decode: "replicate": every rank runs every decode; "owner": decode ``i`` (counted over the decodes of this
            batch) runs on rank ``i mod pcp``.
        compat: "vllm" reproduces vLLM's layout (zigzag with chunks of ``ceil(q / 2P)``); decode="owner" is its sharded
            decode, "replicate" its unsharded one.
        padded_tokens: rows per rank, for example a graph bucket; default the largest rank-local count.

    Raises ConfigError for options that cannot run, LayoutError when ``padded_tokens`` is below the largest rank.
    """
    check_options(pcp, kind, decode, compat, dcp)
    request, start, length = cut(batch, pcp, kind, decode, compat)
    seg_rank, column = np.nonzero(length)
    seg_start = start[seg_rank, column]
    seg_length = length[seg_rank, column]
    seg_request = request[column] if request.ndim == 1 else request[seg_rank, column]

    per_rank = length.sum(axis=1)
    counts: list[int] = per_rank.tolist()
    largest = max(counts)
    if padded_tokens is None:
        padded_tokens = largest
    elif padded_tokens < largest:
        raise LayoutError(
            f"padded_tokens = {padded_tokens} is below the {largest} tokens of the largest rank "
            f"(tokens per rank: {counts}); use at least {largest}."
        )
    rank_begin = np.add.accumulate(per_rank) - per_rank
    flat_offset = np.add.accumulate(seg_length) - seg_length
    # Token at flat row i of a segment: (start - flat offset) + i.
    shift = np.repeat(seg_start - flat_offset, seg_length)

    num_tokens = batch.num_tokens
    num_gathered = pcp * padded_tokens
    # One block for both index vectors: glibc gives two large ones back to the system after every step, and the page
    # faults of the next step then cost three times the arithmetic (measured at 36k tokens).
    block = np.empty(num_gathered + num_tokens, dtype=np.int64)
    gather_index, restore_index = block[:num_gathered], block[num_gathered:]
    flat = counting(max(len(shift), num_gathered))
    num_copied = int(batch.query_lens[batch.decodes].sum()) if decode == "replicate" and pcp > 1 else 0
    if len(shift) == num_gathered and num_copied == 0:
        np.add(shift, flat[:num_gathered], out=gather_index)
        restore_index[gather_index] = flat[:num_gathered]
        write_mask = np.ones(num_gathered, dtype=np.bool_)
    else:
        write_mask = np.zeros(num_gathered, dtype=np.bool_)
        begin = 0
        for rank, count in enumerate(counts):
            first, last, end = rank * padded_tokens, rank * padded_tokens + count, begin + count
            np.add(shift[begin:end], flat[begin:end], out=gather_index[first:last])
            gather_index[last : first + padded_tokens] = 0
            # Decodes are a rank's first rows; copies of replicated ones on ranks above 0 are not written.
            written = first + num_copied if rank else first
            write_mask[written:last] = True
            restore_index[gather_index[written:last]] = flat[written:last]
            begin = end
    return Layout(
        batch=batch,
        kind=kind,
        decode=decode,
        compat=compat,
        pcp=pcp,
        num_tokens=num_tokens,
        padded_tokens=padded_tokens,
        per_rank_tokens=per_rank,
        rows_per_rank=np.count_nonzero(length, axis=1),
        seg_rank=seg_rank,
        seg_request=seg_request,
        seg_start=seg_start,
        seg_length=seg_length,
        seg_offset=flat_offset - rank_begin[seg_rank],
        gather_index=gather_index,
        write_mask=write_mask,
        restore_index=restore_index,
    )


def dispatch_tokens(
    batch: Batch,
    pcp: int,
    *,
    kind: str = "zigzag",
    decode: str = "replicate",
    compat: str | None = None,
    dcp: int = 1,
) -> int:
    """The largest rank-local token count of :func:`build_layout`, in closed form: no row table is built.

    A graph bucket is the smallest that holds this count. Even chunks leave the ranks' prefill counts within one of
    each other, in rotation from the first remainder rank, whatever the kind.
    """
    check_options(pcp, kind, decode, compat, dcp)
    prefill_lens = batch.query_lens[batch.prefills]
    if compat == "vllm":
        sizes = vllm_chunks(prefill_lens, pcp).sum(axis=1)
        per_rank = sizes[:pcp] + sizes[: pcp - 1 : -1]
    else:
        share, extra = divmod(int(prefill_lens.sum()), pcp)
        turn = (np.arange(pcp) - first_remainder_rank(batch, pcp, decode)) % pcp
        per_rank = share + (turn < extra)
    decode_lens = batch.query_lens[batch.decodes]
    if decode == "replicate":
        return int(per_rank.max()) + int(decode_lens.sum())
    by_owner = np.zeros((-(-len(decode_lens) // pcp), pcp), dtype=np.int64)
    by_owner.ravel()[: len(decode_lens)] = decode_lens
    return int((per_rank + by_owner.sum(axis=0)).max())
