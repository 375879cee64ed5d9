# SPDX-License-Identifier: Apache-2.0
"""Dropless experts in the ways that models write them, and near misses: programs that look alike and mix tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations import moe as _moe  # registers the grouped product that also runs on CPU

from tests.graphs import Program, given, traced

assert _moe is not None
GROUPED: Any = torch.ops.transformers.grouped_mm_fallback
WIDTH, EXPERTS = 6, 4
Tensor = torch.Tensor
Idiom = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""Of hidden states [T, d], expert of each choice i64[T * k], weights [e, d, d] and k: sums over the choices, [T, d]."""


def program(idiom: Idiom, k: int = 2, experts: int = EXPERTS, dtype: torch.dtype = torch.float64) -> Program:
    """The idiom behind a router, between a projection and a residual."""

    def run(x: Tensor, up: Tensor, router: Tensor, weights: Tensor) -> Tensor:
        hidden = x @ up
        scores, chosen = (hidden @ router).softmax(-1).topk(k, dim=-1)
        keys = chosen.reshape(-1)
        return hidden + idiom(hidden * scores.sum(-1, keepdim=True), keys, weights, k)

    sizes = ((WIDTH, WIDTH), (WIDTH, EXPERTS), (experts, WIDTH, WIDTH))
    return traced(run, given("T", WIDTH, dtype=dtype), *(given(*size, dtype=dtype) for size in sizes))


def ends(keys: Tensor, experts: int = EXPERTS) -> Tensor:
    """Where each group ends."""
    return torch.histc(keys.float(), experts, 0, experts - 1).cumsum(0).to(torch.int32)


def combined(rows: Tensor, k: int) -> Tensor:
    return rows.reshape(-1, k, rows.shape[-1]).sum(1)


def by_index_put(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0])
    return combined(rows[inverse], k)


def by_argsort(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    order = torch.argsort(keys)
    rows = GROUPED(x.index_select(0, order // k), weights, ends(keys[order]))
    return combined(rows.index_select(0, torch.argsort(order)), k)


def by_index_add(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    owner = order // k
    rows = GROUPED(x[owner], weights, ends(ordered))
    return torch.zeros_like(x).index_add(0, owner, rows)


def counts_first(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    stops = ends(keys)
    order = torch.sort(keys)[1]
    rows = GROUPED(x[order // k], weights, stops)
    return combined(rows[torch.argsort(order)], k)


def repeated_rows(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x.repeat_interleave(k, 0)[order], weights, ends(ordered))
    return combined(rows[torch.argsort(order)], k)


def with_bias(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    bias = weights[:, 0]
    rows = torch.relu(GROUPED(x[order // k], weights, ends(ordered)) + bias[ordered])
    rows = GROUPED(rows, weights, ends(ordered)) * rows.softmax(-1)
    return combined(rows[torch.argsort(order)], k)


def masked_tail(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """The last expert lives elsewhere: its rows are behind the last group."""
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered, EXPERTS - 1))
    rows = rows.masked_fill((ordered >= EXPERTS - 1)[:, None], 0.0)
    return combined(rows[torch.argsort(order)], k)


def two_sorts_of_two_keys(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    first = by_argsort(x, keys, weights, k)
    others = (first @ weights[0, :, :EXPERTS]).topk(k, dim=-1)[1].reshape(-1)
    return by_index_put(first, others, weights, k)


IDIOMS: dict[str, tuple[Idiom, int, int]] = {
    "index_put": (by_index_put, 2, EXPERTS), "argsort": (by_argsort, 2, EXPERTS),
    "index_add": (by_index_add, 2, EXPERTS),
    "counts first": (counts_first, 2, EXPERTS), "repeated rows": (repeated_rows, 2, EXPERTS),
    "bias": (with_bias, 3, EXPERTS), "masked tail": (masked_tail, 2, EXPERTS - 1),
    "one expert": (by_index_put, 1, EXPERTS),
    "one, index_add": (by_index_add, 1, EXPERTS), "two layers": (two_sorts_of_two_keys, 2, EXPERTS),
    "counts first, k=1": (counts_first, 1, EXPERTS), "all": (by_argsort, 4, EXPERTS),
}  # fmt: skip
"""Row-wise as a whole: name -> idiom, choices per token, experts with weights."""


# Near misses: what each group gets depends on how many tokens there are, or on their order.


def mixes_sorted_rows(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered)).cumsum(0)
    return combined(rows[torch.argsort(order)], k)


def counts_first_then_mixes(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    stops = ends(keys)
    order = torch.sort(keys)[1]
    rows = GROUPED(x[order // k], weights, stops).cumsum(0)
    return combined(rows[torch.argsort(order)], k)


def other_sorts_order(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    other = torch.sort(keys, descending=True)[1]
    rows = GROUPED(x[order // k], weights, ends(ordered))
    return combined(rows[torch.argsort(other)], k)


def other_sorts_counts(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    order = torch.sort(keys)[1]
    other = torch.sort((keys + 1) % EXPERTS)[0]
    rows = GROUPED(x[order // k], weights, ends(other))
    return combined(rows[torch.argsort(order)], k)


def descending(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """Groups are counted upwards and sorted downwards."""
    ordered, order = torch.sort(keys, descending=True)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    return combined(rows[torch.argsort(order)], k)


def descending_argsort(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    order = torch.argsort(keys, descending=True)
    rows = GROUPED(x[order // k], weights, ends(keys))
    return combined(rows[torch.argsort(order)], k)


def counts_of_other_values(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(EXPERTS - 1 - ordered))
    return combined(rows[torch.argsort(order)], k)


def counts_of_other_rows(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    order = torch.sort(keys)[1]
    others = (keys * 3 + 1) % EXPERTS
    rows = GROUPED(x[order // k], weights, ends(others[order]))
    return combined(rows[torch.argsort(order)], k)


def counts_without_the_first(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """Keys below the first bin are sorted in front and counted nowhere."""
    ordered, order = torch.sort(keys - 1)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    return combined(rows[torch.argsort(order)], k)


def counts_from_another_bin(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    stops = torch.histc(ordered.float(), EXPERTS, 1, EXPERTS).cumsum(0).to(torch.int32)
    rows = GROUPED(x[order // k], weights, stops)
    return combined(rows[torch.argsort(order)], k)


def counts_of_narrow_keys(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """A conversion that does not keep the value."""
    wide = keys * 128
    order = torch.sort(wide)[1]
    stops = torch.histc(wide.to(torch.int8).float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
    rows = GROUPED(x[order // k], weights, stops)
    return combined(rows[torch.argsort(order)], k)


def changed_counts(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, (ends(ordered) - 1).clamp(min=0).to(torch.int32))
    return combined(rows[torch.argsort(order)], k)


def counts_twice_summed(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    stops = ends(ordered).cumsum(0).clamp(max=2 * x.shape[0] * k).to(torch.int32)
    return combined(GROUPED(x[order // k], weights, stops.clamp(max=3).to(torch.int32))[torch.argsort(order)], k)


def order_as_data(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered)) * (order[:, None] % 3)
    return combined(rows[torch.argsort(order)], k)


def owner_of_other_k(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // (k + 1)], weights, ends(ordered))
    return combined(rows[torch.argsort(order)], k)


def leaks_sorted_rows(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    return combined(rows, k)


def drops_some_rows(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """A capacity: only the first rows of the sorted order are computed."""
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    kept = torch.cat([rows[:3], torch.zeros_like(rows[3:])])
    return combined(kept[torch.argsort(order)], k)


def inverse_from_one(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    inverse = torch.zeros_like(order)
    inverse[order] = torch.arange(1, order.shape[0] + 1) % order.shape[0]
    return combined(rows[inverse], k)


def inverse_downwards(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    return combined(rows[torch.argsort(order, descending=True)], k)


def rows_of_another_tensor(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """The order read where the rows are k blocks of tokens, not k values per token."""
    ordered, order = torch.sort(keys)
    rows = GROUPED(x.repeat(k, 1)[order], weights, ends(ordered))
    return combined(rows[torch.argsort(order)], k)


def float_keys(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    stops = ends(keys)
    order = torch.sort(keys.float() + x[:, :1].repeat(1, k).reshape(-1) * 0)[1]
    rows = GROUPED(x[order // k], weights, stops)
    return combined(rows[torch.argsort(order)], k)


def two_sorts_of_one(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    stops = ends(keys)
    one, two = torch.sort(keys)[1], torch.argsort(keys)
    rows = GROUPED(x[two // k], weights, stops)
    return combined(rows[torch.argsort(two)], k) + x[one // k].reshape(-1, k, x.shape[-1]).sum(1) * 0


def prefix_of_counts_as_data(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    ordered, order = torch.sort(keys)
    stops = ends(ordered)
    rows = GROUPED(x[order // k], weights, stops) * stops[ordered][:, None]
    return combined(rows[torch.argsort(order)], k)


def position_in_group(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """A capacity per expert counts the rows before."""
    ordered, order = torch.sort(keys)
    rank = (
        torch.arange(order.shape[0])
        - (ends(ordered).long() - torch.histc(ordered.float(), EXPERTS, 0, 3).long())[ordered]
    )
    rows = GROUPED(x[order // k], weights, ends(ordered)) * (rank < 2)[:, None]
    return combined(rows[torch.argsort(order)], k)


def narrow_order(x: Tensor, keys: Tensor, weights: Tensor, k: int) -> Tensor:
    """The order in 32 bits, and its inverse as well."""
    ordered, order = torch.sort(keys)
    order = order.to(torch.int32)
    rows = GROUPED(x[order // k], weights, ends(ordered))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.shape[0], dtype=torch.int32)
    return combined(rows[inverse], k)


NEAR_MISSES: dict[str, tuple[Idiom, int]] = {
    function.__name__: (function, k)
    for function in (
        mixes_sorted_rows, counts_first_then_mixes, other_sorts_order, other_sorts_counts, descending,
        descending_argsort, counts_of_other_values, counts_of_other_rows, counts_without_the_first,
        counts_from_another_bin, counts_of_narrow_keys, changed_counts,
        counts_twice_summed, order_as_data, owner_of_other_k, leaks_sorted_rows,
        drops_some_rows, inverse_from_one, inverse_downwards, rows_of_another_tensor, float_keys, two_sorts_of_one,
        prefix_of_counts_as_data, position_in_group, narrow_order,
    )
    for k in (2,)
} | {
    f"{function.__name__}, k=1": (function, 1)
    for function in (
        leaks_sorted_rows, owner_of_other_k, rows_of_another_tensor, mixes_sorted_rows, descending, order_as_data,
    )
}  # fmt: skip
"""Whatever the passes make of these must equal the captured program: name -> idiom and choices per token."""
