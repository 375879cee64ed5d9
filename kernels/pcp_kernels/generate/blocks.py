# SPDX-License-Identifier: Apache-2.0
"""Blocks that the scoring and selecting kernels share: order keys, the held candidates of a row, the tile of scores.

A row under selection holds, in ascending key order, a superset of the ``TOPK`` best of what was scanned so far. New
keys are appended while they beat ``floor``, the ``TOPK``-th best at the last pruning; a later key that equals
``floor`` has a larger index than ``TOPK`` keys at least as good, so the strict comparison loses nothing. Pruning
keeps the ascending order, so "the first of the equal ones" is "the smallest index".
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from pcp_kernels.generate.text import POINTERS, block, next_power, upcast
from pcp_kernels.specs import ScoreSpec

VOID = -(2**31)
"""Order key of what is no candidate; below the key of NaN."""

NUMERICS = """products and sums over dim by one tl.dot with an fp32 accumulator; then relu (NaN becomes 0), weight,
sum over heads in tl.sum's order, scale of the key last. Launch settings, layout, split and the other rows of a tile
take no part in it; ties go to the smaller index."""

ORDER_KEY = '''
def order_key(score):
    """An i32 that orders as the score does: -0 is +0, NaN lies below every number and above VOID."""
    score = tl.where(score == 0.0, 0.0, score)
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(score != score, VOID + 1, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
'''

BEST = '''
def best(key):
    """Of CAPACITY order keys: which are the TOPK best, their places in a dense list, and the worst of them.

    Bisects the value of the TOPK-th best bit by bit. Of keys that equal it, the first ones are taken. With fewer than
    TOPK candidates all are kept and the third result is VOID.
    """
    rank = key.to(tl.uint32, bitcast=True) ^ 0x80000000
    cut = tl.full((), 0, tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        enough = tl.sum((rank >= (cut | bit)).to(tl.int32), axis=0) >= TOPK
        cut = tl.where(enough, cut | bit, cut)
        bit = bit >> 1
    above = rank > cut
    level = (rank == cut) & (key != VOID)
    # One scan counts both: CAPACITY is below 2**15.
    seen = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), axis=0)
    room = TOPK - tl.sum(above.to(tl.int32), axis=0)
    keep = above | (level & ((seen >> 16) <= room))
    place = (seen & 0xFFFF) + tl.minimum(seen >> 16, room) - 1
    return keep, place, (cut ^ 0x80000000).to(tl.int32, bitcast=True)
'''

PRUNE = '''
def prune(held_key_ptr, held_id_ptr, count):
    """Reduce the candidates of one row to its TOPK best, in place and in order; the order key of the worst."""
    tl.debug_barrier()
    slot = tl.arange(0, CAPACITY)
    key = tl.load(held_key_ptr + slot, mask=slot < count, other=VOID)
    keep, place, cut = best(key)
    index = tl.load(held_id_ptr + slot, mask=keep, other=-1)
    tl.debug_barrier()
    tl.store(held_key_ptr + place, key, mask=keep)
    tl.store(held_id_ptr + place, index, mask=keep)
    return cut
'''


CONTIGUOUS_RANGE = """
since = tl.where(live, start, 0x7FFFFFFF)
until = tl.where(live, end, 0)
low = tl.min(since, axis=0)
high = tl.max(until, axis=0)
"""
"""Keys ``low`` to ``high`` that some row of the tile looks at; each row at ``since`` to ``until`` of them."""

CONTIGUOUS_GATE = "(n[:, None] >= since[None, :]) & (n[:, None] < until[None, :])"

NEXT_REQUEST = """
# The rows of a tile may belong to several requests: one scan for each.
while tl.max(waiting.to(tl.int32), axis=0) > 0:
    request = tl.max(tl.where(waiting, requests, -1), axis=0)
    until = tl.where(waiting & (requests == request), end, 0)
    waiting = waiting & (requests != request)
    table = request.to(tl.int64) * table_stride
    high = tl.max(until, axis=0)
"""
"""Head of a loop over the requests of the ``waiting`` rows; keys are numbered within the request."""

PAGED_GATE = "(n[:, None] < until[None, :])"


def stack(*parts: str | None) -> str:
    """Parts one below the other, as they are indented; the empty ones vanish."""
    return "\n".join(filter(None, parts))


def define(name: str, signature: Mapping[str, str], summary: str) -> str:
    """``def name(...)`` with its docstring, the arguments wrapped."""
    arguments = textwrap.wrap(", ".join(signature), 110)
    return "\n".join([f"def {name}(", *(f"    {line}" for line in arguments), "):", f'    """{summary}"""'])


def selector_constants(topk: int, capacity: int) -> dict[str, int]:
    """Constants of :data:`BEST` and of the emission of a row."""
    return {"TOPK": topk, "CAPACITY": capacity, "OUT": next_power(topk), "VOID": VOID}


def score_constants(spec: ScoreSpec) -> dict[str, int]:
    """Constants of :func:`score_tile`."""
    constants = {
        "HEADS": spec.heads,
        "DIM": spec.dim,
        "BLOCK_KEYS": spec.block_keys,
        "BLOCK_QUERIES": spec.block_queries,
        "STAGES": spec.stages,
    }
    if spec.layout == "paged":
        constants["PAGE"] = spec.page
    return constants


def score_signature(spec: ScoreSpec) -> dict[str, str]:
    """Arguments of a scoring kernel that come before its outputs."""
    signature = {"q_ptr": POINTERS[spec.store], "w_ptr": "*fp32", "key_ptr": POINTERS[spec.store]}
    if spec.store == "fp8":
        signature["scale_ptr"] = "*fp32"
    if spec.layout == "paged":
        signature |= {"table_ptr": "*i32", "request_ptr": "*i32"}
    else:
        signature["start_ptr"] = "*i32"
    return signature | {"end_ptr": "*i32"}


def score_strides(spec: ScoreSpec) -> dict[str, str]:
    """Integer arguments of a scoring kernel.

    ``limit`` is where the keys end: those of ``key_ptr``, paged: those that a row of the block table can name. Bad
    bounds then select badly, but read nothing else. ``key_stride`` is that of a key, paged: of a page, in elements.
    """
    strides = {"rows": "i32", "limit": "i32", "q_stride": "i64", "w_stride": "i64", "key_stride": "i64"}
    return strides | ({"table_stride": "i64"} if spec.layout == "paged" else {})


def aligned(signature: Mapping[str, str]) -> tuple[str, ...]:
    """Strides that are multiples of 16 as a rule; a block table may have any number of columns."""
    return tuple(name for name in signature if name.endswith("_stride") and name != "table_stride")


def load_rows(spec: ScoreSpec, idle: str) -> str:
    """Which keys the rows ``row`` of a tile look at: ``start`` (contiguous keys), ``end``; ``requests`` (paged).

    Rows with at most ``idle`` keys are not scored; a row of no request (below 0) has none.
    """
    paged = spec.layout == "paged"
    return stack(
        "real = row < rows",
        "requests = tl.load(request_ptr + row, mask=real, other=-1)" if paged else None,
        None if paged else "start = tl.maximum(tl.load(start_ptr + row, mask=real, other=0), 0)",
        "end = tl.minimum(tl.load(end_ptr + row, mask=real, other=0), limit)",
        "valid_keys = tl.where(requests < 0, 0, end)" if paged else "valid_keys = end - start",
        f"live = real & (valid_keys > {idle})",
    )


def load_queries(spec: ScoreSpec, interpret: bool) -> str:
    """Queries of the tile as ``[DIM, BLOCK_QUERIES * HEADS]`` and the weights of their heads."""
    load = "tl.load(q_ptr + q_offset[None, :] + feature[:, None], mask=(owner < rows)[None, :], other=0.0)"
    return block(
        f"""
        column = tl.arange(0, BLOCK_QUERIES * HEADS)
        owner = first_row + column // HEADS
        head = column % HEADS
        feature = tl.arange(0, DIM)
        q_offset = owner.to(tl.int64) * q_stride + head * DIM
        q = {upcast(load, spec.store, interpret)}
        w = tl.load(w_ptr + owner.to(tl.int64) * w_stride + head, mask=owner < rows, other=0.0)
        """
    )


def score_tile(spec: ScoreSpec, interpret: bool) -> str:
    """``score`` ``[BLOCK_KEYS, BLOCK_QUERIES]`` of the keys ``begin + step`` below ``high``.

    The accumulation of FP8 products is pinned to that of the tensor core over the whole of DIM (on sm_90 it keeps
    fewer bits than fp32): Triton's own default goes by architecture and may change with its version.
    """
    fp8, paged = spec.store == "fp8", spec.layout == "paged"
    keys = upcast(
        "tl.load(key_ptr + offset[:, None] + feature[None, :], mask=inside[:, None], other=0.0)", spec.store, interpret
    )
    if paged:
        place = block(
            """
            page = tl.load(table_ptr + table + n // PAGE, mask=inside, other=0).to(tl.int64)
            offset = page * key_stride + n % PAGE * DIM
            """
        )
    else:
        place = "offset = n.to(tl.int64) * key_stride"
    return stack(
        "n = begin + step",
        "inside = n < high",
        place,
        f"keys = {keys}",
        "scale_offset = page * (key_stride // 4) + PAGE * DIM // 4 + n % PAGE" if fp8 and paged else None,
        f"scale = tl.load(scale_ptr + {'scale_offset' if paged else 'n'}, mask=inside, other=0.0)" if fp8 else None,
        f'dots = tl.dot(keys, q, input_precision="ieee"{", max_num_imprecise_acc=DIM" if fp8 else ""})',
        "heads = tl.maximum(dots, 0.0) * w[None, :]",
        "score = tl.sum(tl.reshape(heads, (BLOCK_KEYS, BLOCK_QUERIES, HEADS)), axis=2)",
        "score = score * scale[:, None]" if fp8 else None,
    )
