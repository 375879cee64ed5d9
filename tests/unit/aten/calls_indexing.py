# SPDX-License-Identifier: Apache-2.0
"""Sample calls of ops that read, write and join at indices, and of ops that read one node in two roles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.graphs import ATEN, Dim, Given, Sample, Size, given, sample

A = ATEN
T = Size(1)


def ints(*shape: Dim, high: Any = 3, low: int = 0, dtype: torch.dtype = torch.int64) -> Given:
    """Indices below ``high``."""
    return given(*shape, dtype=dtype, low=low, high=high)


def dims_of(shape: tuple[Dim, ...]) -> list[int]:
    """First, middle and last dimension."""
    return [0] if len(shape) == 1 else [0, -1] if len(shape) == 2 else [0, 1, -1]


def indexing_calls() -> Iterator[Sample]:
    for shape in (("T",), (2, "T"), ("2T",), (2, 3)):
        yield sample(A.embedding.default, given(5, 4), ints(*shape, high=5))
    yield sample(A.embedding.default, given("T", 4), ints("T", high="T"))
    for shape in (("T", 3), (3, "T"), ("T", 2, 4), (2, "2T", 4)):
        for dim in dims_of(shape):
            high = shape[dim]
            for index in (ints("T", high=high), ints("2T", high=high), ints(4, high=high)):
                yield sample(A.index_select.default, given(*shape), dim, index)
            same = [*shape]
            yield sample(A.gather.default, given(*shape), dim, ints(*same, high=high))
            yield sample(A.take_along_dim.default, given(*shape), ints(*same, high=high), dim)
            yield sample(A.scatter.src, given(*shape), dim, _unique(shape, dim), given(*shape))
            yield sample(A.scatter.value, given(*shape), dim, ints(*same, high=high), 2.0)
            yield sample(A.scatter_add.default, given(*shape), dim, ints(*same, high=high), given(*shape))
            yield sample(A.scatter_reduce.two, given(*shape), dim, ints(*same, high=high), given(*shape), "amax")
            same[dim % len(same)] = 2
            yield sample(A.gather.default, given(*shape), dim, ints(*same, high=high))
            same[dim % len(same)] = "T"
            yield sample(A.gather.default, given(*shape), dim, ints(*same, high=high))
            yield sample(A.take_along_dim.default, given(*shape), ints(*same, high=high), dim)
    yield sample(A.take_along_dim.default, given("T", 3), ints("T", 1), 1)
    yield sample(A.take_along_dim.default, given("T", 3), ints(1, 2), 1)
    yield sample(A.take_along_dim.default, given(1, 3), ints("T", 2), 1)
    yield sample(A.take_along_dim.default, given("T", 3), ints("T", high=3))
    yield sample(A.gather.default, given("2T", 3), 1, ints("T", 2))
    x = given("T", 3, 4)
    yield from (sample(A.index.Tensor, x, entry) for entry in (
        [ints("T", high="T")], [None, ints(2)], [None, ints("T")], [None, None, ints("2T", high=4)],
        [ints("T", high="T"), ints("T")], [ints("T", 1, high="T"), ints(2)], [ints("T", 1, high="T"), ints(1, "T")],
        [None, ints(2, 5), ints(5, high=4)], [ints(5, high="T"), None, ints(5, high=4)],
        [ints("T", high="T"), None, ints("T", high=4)], [ints(2, high="T"), ints("T", 1)],
        [None, ints("T", 2), ints(2, high=4)],
        [given("T", dtype=torch.bool)], [None, given(3, dtype=torch.bool)],
    ))  # fmt: skip
    yield sample(A.index.Tensor, given(2, "T", 3, 4), [ints(5, high=2), None, ints(5)])
    yield sample(A.index.Tensor, given(2, 3, "T"), [None, ints(5)])
    yield sample(A.index.Tensor, given(2, 3, "T"), [ints(5, 2, high=2), ints(5, 1)])
    yield sample(A.index.Tensor, given(2, 3, 4, "T"), [ints(5, high=2), None, ints(5, high=4)])
    yield sample(A.index.Tensor, given(2, 3, "T", 4), [ints(5, high=2), None, None, ints(5, high=4)])
    yield sample(A.index.Tensor, given(6, 4), [ints("T", high=6)])
    yield sample(A.index.Tensor, given(6, 4), [ints("T", 2, high=6)])
    yield sample(A.index.Tensor, given(6, 4), [None, ints("T", 2, high=4)])
    yield sample(A.index.Tensor, given(6, 4, 2), [ints("T", high=6), None, ints("T", high=2)])
    yield sample(A.index.Tensor, given("2T", 4), [ints("T", high="T")])
    for accumulate in (False, True):
        for indices, value in (([None, ints(2)], ()), ([None, ints(2)], (1,)), ([None, ints(2)], ("T", 2, 4)),
                               ([ints("T", high="T")], ()), ([None, None, ints(2, high=4)], (1, 1))):  # fmt: skip
            yield sample(A.index_put.default, given("T", 3, 4), indices, given(*value), accumulate)
    yield sample(A.index_put.default, given("T", 3), [None, given(3, dtype=torch.bool)], given())


def _unique(shape: tuple[Dim, ...], dim: int) -> Given:
    """Zeros where entries along ``dim`` would collide: one write wins, and no order decides which."""
    return ints(*[1 if i == dim % len(shape) else size for i, size in enumerate(shape)], high=shape[dim])


def joining_calls() -> Iterator[Sample]:
    for shape in (("T", 3), (2, "T", 4), ("T", 2, 4), ("2T", 4)):
        x, y = given(*shape), given(*shape)
        for dim in dims_of(shape):
            for name in ("cat", "concat", "concatenate"):
                yield sample(getattr(A, name).default, [x, y], dim)
            yield sample(A.cat.default, [x, x, y], dim)
            yield sample(A.stack.default, [x, y], dim)
            yield sample(
                A.select_scatter.default, x, given(*[s for i, s in enumerate(shape) if i != dim % len(shape)]), dim, 1
            )
            wide = [1 if i == dim % len(shape) else s for i, s in enumerate(shape)]
            yield sample(A.slice_scatter.default, x, given(*wide), dim, 0, 1)
        yield sample(A.stack.default, [x, y], len(shape))
        yield sample(A.stack.default, [x, y], -len(shape) - 1)
        for pads in ([1, 2], [1, 0, 0, 2], [0, 0, 1, 1]):
            yield sample(A.constant_pad_nd.default, x, pads, 1.5)
            yield sample(A.pad.default, x, pads, "constant", 0.5)
        yield sample(A.constant_pad_nd.default, x, [0, -1])
        yield sample(A.one_hot.default, ints(*shape, high=5), 5)
    yield sample(A.cat.default, [given("T", 3), given("T", 1)], 1)
    yield sample(A.cat.default, [given("T", 3), given(2, 3)], 0)
    yield sample(A.cat.default, [given(0), given("T", 3)], 1)
    yield sample(A.pad.default, given(2, "T", 4), [1, 1], "reflect")
    yield sample(A.pad.default, given(2, 4, "T"), [1, 1], "circular")
    yield sample(A.slice_scatter.default, given("T", 4), given("T", 2), 1, 1, 3)
    yield sample(A.slice_scatter.default, given("T", 4), given("T", 4), 0, 0, T)


def twice_calls() -> Iterator[Sample]:
    """One node in two roles, where only one of them may be rows."""
    x, index, square = given("T", "T"), ints("T", high="T"), ints("T", "T", high="T")
    for target in (A.mm.default, A.matmul.default):
        yield sample(target, x, x)
    yield sample(A.addmm.default, x, x, given("T", "T"))
    yield sample(A.addmm.default, x, given("T", "T"), x)
    yield sample(A.addmm.default, x, x, x)
    yield sample(A.linear.default, x, x)
    yield sample(A.linear.default, x, given("T", "T"), x)
    yield sample(A.einsum.default, "td,sd->ts", [x, x])
    yield sample(A.index_select.default, index, 0, index)
    yield sample(A.gather.default, index, 0, index)
    yield sample(A.gather.default, square, 0, square)
    yield sample(A.gather.default, square, 1, square)
    yield sample(A.take_along_dim.default, index, index, 0)
    yield sample(A.index.Tensor, index, [index])
    yield sample(A.index.Tensor, square, [None, square])
    yield sample(A.index.Tensor, given("T", "T", 3), [index, index])
    yield sample(A.embedding.default, square, square)
    yield sample(A.scatter.src, square, 1, square, square)
    yield sample(A.scatter_add.default, square, 0, square, square)
    yield sample(A.conv1d.default, *(given("T", 3, 2),) * 2)
    yield sample(A.convolution.default, *(given("T", 3, 2),) * 2, None, [1], [0], [1], False, [0], 1)
    yield sample(A.add.Tensor, x, x)
    yield sample(A.where.self, given("T", "T", dtype=torch.bool), x, x)
    yield sample(A.scaled_dot_product_attention.default, x, x, x, x)
    yield sample(A.cat.default, [x, x], 1)
    yield sample(A.slice_scatter.default, x, x, 1)
    yield sample(A.layer_norm.default, given("T"), [T], *(given("T"),) * 2)
