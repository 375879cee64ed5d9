# SPDX-License-Identifier: Apache-2.0
"""Sample calls of the ops that are not element-wise: tokens in every place, merged dimensions, negative dimensions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from tests.graphs import ATEN, Dim, Given, Sample, Size, given, sample
from tests.unit.aten.calls_indexing import dims_of, indexing_calls, ints, joining_calls, twice_calls

A = ATEN
T, T2 = Size(1), Size(2)

SHAPES: tuple[tuple[Dim, ...], ...] = (
    ("T",), ("T", 3), (3, "T"), (2, "T", 4), ("2T", 4), ("T", "T", 2),
)  # fmt: skip


def view_calls() -> Iterator[Sample]:
    for shape in SHAPES:
        rank = len(shape)
        yield sample(A.unsqueeze.default, given(*shape), 0)
        yield sample(A.unsqueeze.default, given(*shape), -1)
        yield sample(A.permute.default, given(*shape), list(reversed(range(rank))))
        yield sample(A.permute.default, given(*shape), [-1, *range(rank - 1)])
        yield sample(A.repeat.default, given(*shape), [2] * rank)
        yield sample(A.repeat.default, given(*shape), [3, *[1] * rank])
        yield sample(A.tile.default, given(*shape), [2])
        yield sample(A.tile.default, given(*shape), [2] * (rank + 1))
        yield sample(A.expand.default, given(*shape), [2, *[-1] * rank])
        yield sample(A.squeeze.default, given(*shape, 1))
        yield sample(A.squeeze.default, given(1, *shape))
        yield sample(A.squeeze.dims, given(1, *shape, 1), [0, -1])
        yield sample(A.squeeze.dims, given(1, *shape), [0, 1])
        yield sample(A.numpy_T.default, given(*shape))
        for dim in dims_of(shape):
            yield sample(A.squeeze.dim, given(1, *shape), dim)
            yield sample(A.select.int, given(*shape), dim, 0)
            yield sample(A.select.int, given(*shape), dim, -1)
            yield sample(A.slice.Tensor, given(*shape), dim, 1, 3)
            yield sample(A.slice.Tensor, given(*shape), dim, 0, 2**63 - 1)
            yield sample(A.slice.Tensor, given(*shape), dim, 0, 2**63 - 1, 2)
            yield sample(A.slice.Tensor, given(*shape), dim, -1)
            yield sample(A.slice.Tensor, given(*shape), dim)
            yield sample(A.movedim.int, given(*shape), dim, 0)
            yield sample(A.movedim.int, given(*shape), 0, dim)
            yield sample(A.moveaxis.int, given(*shape), dim, -1)
            yield sample(A.transpose.int, given(*shape), dim, 0)
            yield sample(A.transpose.int, given(*shape), -1, dim)
            yield sample(A.swapaxes.default, given(*shape), 0, dim)
            yield sample(A.swapdims.default, given(*shape), 0, dim)
            yield sample(A.repeat_interleave.self_int, given(*shape), 2, dim)
            yield sample(A.unfold.default, given(*shape), dim, 2, 1)
            if isinstance(shape[dim], int):
                yield sample(A.unbind.int, given(*shape), dim)
                for name in ("split", "unsafe_split"):
                    yield sample(getattr(A, name).Tensor, given(*shape), 2, dim)
                for name in ("chunk", "unsafe_chunk"):
                    yield sample(getattr(A, name).default, given(*shape), 2, dim)
                yield sample(A.split_with_sizes.default, given(*shape), [1, shape[dim] - 1], dim)
                yield sample(A.split.sizes, given(*shape), [1, shape[dim] - 1], dim)
                yield sample(A.split_copy.Tensor, given(*shape), 2, dim)
        if rank > 1:
            for name in ("mT", "adjoint"):
                yield sample(getattr(A, name).default, given(*shape))
            yield sample(A.flatten.using_ints, given(*shape), 0, 1)
            yield sample(A.flatten.using_ints, given(*shape), -2, -1)
            yield sample(A.flatten.using_ints, given(*shape))
            yield sample(A.movedim.intlist, given(*shape), [0, 1], [1, 0])
        if rank <= 2:
            yield sample(A.t.default, given(*shape))
        if rank == 2:
            yield sample(A.matrix_H.default, given(*shape))
            yield sample(A.repeat_interleave.self_int, given(*shape), 2)
    yield sample(A.repeat_interleave.self_int, given("T", 3), 2, 0, output_size=T2)
    yield sample(A.repeat_interleave.self_int, given("T", 3), 2, 1, output_size=6)
    yield sample(A.repeat_interleave.self_Tensor, given(3, "T"), ints(3, low=1), 0, output_size=6)
    yield sample(A.repeat_interleave.self_Tensor, given("T", 3), ints("T", low=1, high=2), 0, output_size=T)
    yield sample(A.view_as_real.default, given(2, "T", 3, dtype=torch.complex128))
    yield sample(A.view_as_real.default, given("T", dtype=torch.complex128))
    yield sample(A.view_as_complex.default, given(3, "2T", 2))
    yield sample(A.view_as_complex.default, given("T", 2))
    yield sample(A.expand.default, given("T", 1, 4), [3, T, 2, 4])
    yield sample(A.expand.default, given("T", 1), [T, T])
    yield sample(A.expand.default, given(1, "2T"), [T, -1])
    yield sample(A.broadcast_to.default, given("T", 1), [2, T, 5])
    yield sample(A.slice.Tensor, given("T", 4), 0, 0, T)
    yield sample(A.slice.Tensor, given("T", 4), 1, 0, T)
    yield sample(A.slice.Tensor, given("2T", 4), 0, 0, T)
    yield sample(A.slice.Tensor, given("2T", 4), 0, T, T2)
    yield sample(A.slice.Tensor, given("T", "T"), 0, 0, T)


RESHAPES: tuple[tuple[tuple[Dim, ...], list[Any]], ...] = (
    (("T", 4), [T, 2, 2]), (("T", 4), [-1, 2, 2]), (("T", 4), [T, -1, 2]), (("T", 4), [1, T, 4]), (("T", 4), [-1]),
    ((1, "T", 4), [T, 4]), ((2, "T", 4), [T2, 4]), ((2, "T", 4), [-1, 4]), ((2, "T", 4), [2, -1]),
    (("T", 2, 4), [T2, 4]), (("T", 2, 4), [-1, 4]), (("T", 2, 4), [T, 8]),
    (("2T", 4), [T, 2, 4]), (("2T", 4), [2, T, 4]), (("2T", 4), [2, -1, 4]),
    (("4T",), [2, T2]), (("4T",), [T, 2, 2]), (("4T",), [2, T, 2]), ((4, "T"), [2, T2]), ((4, "T"), [-1, T2]),
    (("T", 4), [T2, 2]), (("T", 4), [T2, -1]), (("T", 6), [3, T2]), (("T", "T"), [-1]), (("T", "T", 2), [T, -1]),
    (("T", "T", 2), [T, T2]), (("T", "T", 2), [T2, T]), (("T", 1, 4), [T, 4]), (("T",), [T, 1]), (("T",), [1, -1]),
    (("T", 0), [T, 0]), ((2, 3, "T"), [3, 2, T]), ((2, "T", 3), [3, T, 2]), ((2, "3T"), [3, T2]), (("T", 4), [2, T, 2]),
)  # fmt: skip


def reshape_calls() -> Iterator[Sample]:
    for number, (shape, sizes) in enumerate(RESHAPES):
        yield sample(A.reshape.default, given(*shape), sizes)
        others = (A.view.default, A._unsafe_view.default, A.view_copy.default, A._reshape_copy.default)
        yield sample(others[number % 4], given(*shape), sizes)
    yield sample(A.unflatten.int, given("T", 4), 1, [2, 2])
    yield sample(A.unflatten.int, given("T", 4), -1, [-1, 2])
    yield sample(A.unflatten.int, given("2T", 4), 0, [T, 2])
    yield sample(A.unflatten.int, given("2T", 4), -2, [2, T])
    yield sample(A.unflatten.int, given(3, "4T", 4), 1, [2, T, 2])
    yield sample(A.unflatten.int, given(3, "4T", 4), 1, [2, -1, 2])
    yield sample(A.unflatten.int, given(4, "T"), 0, [2, 2])
    for dtype in (torch.float32, torch.complex128, torch.int64):
        yield sample(A.view.dtype, given("T", 4), dtype)
        yield sample(A.view.dtype, given(4, "2T"), dtype)
    yield sample(A.view_copy.dtype, given("T", 4), torch.float32)


ALONG = (
    "softmax.int log_softmax.int cumsum.default cumprod.default logcumsumexp.default cummax.default cummin.default"
    " sort.default argsort.default mean.dim sum.dim_IntList amax.default amin.default prod.dim_int argmax.default"
    " argmin.default max.dim min.dim logsumexp.default std.dim var.dim var.correction var_mean.correction"
    " nansum.default std_mean.dim median.dim glu.default _safe_softmax.default fft_fft.default fft_ifft.default"
    " fft_rfft.default fft_irfft.default flip.default count_nonzero.dim_IntList linalg_vector_norm.default"
    " norm.ScalarOpt_dim any.dim"
    " all.dim any.dims all.dims sort.stable argsort.stable _softmax.default _log_softmax.default topk.default"
    " kthvalue.default roll.default std.correction max.default min.default sum.default mean.default any.default"
    " all.default var.default std.default norm.Scalar argmax.default linalg_vector_norm.default prod.default"
).split()


def along_calls() -> Iterator[Sample]:
    for shape in (("T", 3), (2, "T", 4), ("2T", 4), ("T", "T", 2)):
        x = given(*shape)
        for name in ALONG:
            target = _overload(name)
            for dim in dims_of(shape):
                yield from _along(target, name, x, dim, shape)
    for dims in ([0, 2], [-1, 0], [1], []):
        for keep in (False, True):
            yield sample(A.sum.dim_IntList, given(2, "T", 4), dims, keep)
            yield sample(A.mean.dim, given(2, "T", 4), dims, keep)
            yield sample(A.amax.default, given("T", 2, 4), dims, keep)
            yield sample(A.linalg_vector_norm.default, given("T", 2, 4), 2, dims, keep)
            yield sample(A.var.correction, given(2, "T", 4), dims, keepdim=keep)
            yield sample(A.any.dims, given(2, "T", 4, dtype=torch.bool), dims, keep)
    yield sample(A.max.other, given("T", 3), given("T", 3))
    yield sample(A.max.other, given("T", 3), given(3))
    yield sample(A.sum.dim_IntList, given("T", 3), None, True)
    yield sample(A.argmax.default, given("T", 3))
    yield sample(A.roll.default, given("T", 3), [1])


def _overload(name: str) -> Any:
    base, overload = name.split(".")
    return getattr(getattr(A, base), overload)


def _along(target: Any, name: str, x: Given, dim: int, shape: tuple[Dim, ...]) -> Iterator[Sample]:
    names = [declared.name for declared in target._schema.arguments]
    values: dict[str, Any] = {
        "dim": dim,
        "half_to_float": False,
        "k": 1,
        "shifts": [1],
        "p": 2,
        "ord": 2,
        "stable": True,
    }
    values["dims"] = [dim]
    base = name.split(".")[0]
    many = {"sum", "mean", "amax", "amin", "logsumexp", "std", "var", "var_mean", "std_mean", "nansum", "count_nonzero"}
    if base in (*many, "linalg_vector_norm", "norm") or name in ("any.dims", "all.dims"):
        values["dim"] = [dim]
    if base == "glu" and shape[dim] in (1, 3, "T", "3T"):
        return
    for keep in (False, True) if "keepdim" in names else (None,):
        args, kwargs = [x], {}
        for declared in target._schema.arguments[1:]:
            value = keep if declared.name == "keepdim" else values.get(declared.name, declared.default_value)
            if declared.name not in values and declared.name != "keepdim" and declared.kwarg_only:
                continue
            if declared.kwarg_only:
                kwargs[declared.name] = value
            else:
                args.append(value)
        yield sample(target, *args, **kwargs)


def norm_calls() -> Iterator[Sample]:
    for shape in (("T", 4), (2, "T", 4), ("T", 2, 4), (4, "T"), ("2T", 4)):
        last = shape[-1]
        if isinstance(last, int):
            weight, bias = given(last), given(last)
            yield sample(A.layer_norm.default, given(*shape), [last], weight, bias)
            yield sample(A.layer_norm.default, given(*shape), [last])
            yield sample(A.native_layer_norm.default, given(*shape), [last], weight, bias, 1e-5)
            yield sample(A.rms_norm.default, given(*shape), [last], weight)
            if hasattr(A, "_fused_rms_norm"):
                yield sample(A._fused_rms_norm.default, given(*shape), [last], weight, 1e-5)
        else:
            yield sample(A.layer_norm.default, given(*shape), [T], given("T"), given("T"))
            yield sample(A.rms_norm.default, given(*shape), [T], given("T"))
    yield sample(A.layer_norm.default, given("T", 2, 4), [2, 4], given(2, 4))
    yield sample(A.layer_norm.default, given(2, "T", 4), [T, 4], given("T", 4))
    for kernel in (1, 2):
        for rank in (1, 2, 3):
            side, weight = (4,) * rank, given(6, 2, *(kernel,) * rank)
            conv = (getattr(A, f"conv{rank}d").default, A.convolution.default)
            tail = ([1] * rank, [0] * rank, [1] * rank)
            yield sample(conv[0], given("T", 2, *side), weight, given(6))
            yield sample(conv[1], given("T", 2, *side), weight, None, *tail, False, [0] * rank, 1)
            yield sample(conv[0], given(3, 2, "T", *side[1:]), weight)
            yield sample(conv[0], given(2, "T", *side[1:]), weight)
            yield sample(conv[1], given(3, 2, "T", *side[1:]), weight, None, *tail, False, [0] * rank, 1)
    yield sample(A.convolution.default, given("T", 2, 4), given(2, 6, 2), None, [1], [0], [1], True, [0], 1)
    yield sample(A.conv1d.padding, given("T", 2, 4), given(6, 2, 3), None, [1], "same")
    yield sample(A.group_norm.default, given("T", 4, 3), 2, given(4), given(4))
    yield sample(A.group_norm.default, given(3, 4, "T"), 2, given(4), given(4))
    yield sample(A.group_norm.default, given("2T", 4), 2)


def product_calls() -> Iterator[Sample]:
    for a, b in (
        (("T", 4), (4, 3)), ((3, 4), (4, "T")), ((3, "T"), ("T", 2)), (("T", "T"), ("T", 3)), (("T", 4), (4, "T")),
        (("2T", 4), (4, 3)), ((3, 4), (4, "2T")),
    ):  # fmt: skip
        yield sample(A.mm.default, given(*a), given(*b))
        yield sample(A.matmul.default, given(*a), given(*b))
        for bias in ((b[-1],), (a[0], b[-1]), (a[0], 1), (1, b[-1])):
            yield sample(A.addmm.default, given(*bias), given(*a), given(*b))
    for a, b in (
        ((2, "T", 4), (2, 4, 3)), (("T", 2, 4), ("T", 4, 3)), ((2, 3, 4), (2, 4, "T")), ((2, 3, "T"), (2, "T", 4)),
        (("2T", 2, 4), ("2T", 4, 3)), (("T", "T", 4), ("T", 4, 3)),
    ):  # fmt: skip
        yield sample(A.bmm.default, given(*a), given(*b))
        yield sample(A.baddbmm.default, given(b[-1]), given(*a), given(*b))
        yield sample(A.baddbmm.default, given(a[0], a[1], b[-1]), given(*a), given(*b))
    for a, b in (
        ((2, "T", 4), (4, 3)), (("T", 4), (5, 4, 3)), (("T", 1, 2, 4), (3, 4, 2)), ((2, 1, 3, 4), ("T", 4, 2)),
        (("T", 1, 2, 4), (1, 3, 4, 2)), ((2, 3, 4), (4, "T")), (("T",), ("T", 3)), (("T", 4), (4,)),
        ((2, "T", 4), (2, 4, "T")), ((1, "T", 2, 4), (3, 1, 4, 2)), (("T", 2, 4), (1, 4, 3)),
    ):  # fmt: skip
        yield sample(A.matmul.default, given(*a), given(*b))
    for x in (("T", 4), (2, "T", 4), ("T", 2, 4), ("2T", 4), (4,), (4, "T")):
        yield sample(A.linear.default, given(*x), given(3, x[-1]), given(3))
        yield sample(A.linear.default, given(*x), given(3, x[-1]))
    yield sample(A.linear.default, given("T", 4), given("T", 4))
    yield sample(A.linear.default, given("T", 4), given(4))
    yield sample(A.linear.default, given("T", 4), given(3, 4), given("T", 3))
    for equation, *shapes in (
        ("td,df->tf", ("T", 4), (4, 3)), ("bthd,bshd->bhts", (2, "T", 3, 4), (2, 5, 3, 4)),
        ("td,sd->ts", ("T", 4), ("T", 4)), ("ts,sd->td", ("T", "T"), ("T", 4)), ("td,t->d", ("T", 4), ("T",)),
        ("tk,tkd->td", ("T", 2), ("T", 2, 4)),
        ("td,td->t", ("T", 4), (1, 4)), ("ted,edf->tef", ("T", 3, 4), (3, 4, 2)), ("td->dt", ("T", 4)),
        ("td,te,tf->tdef", ("T", 2), ("T", 3), (1, 2)),
    ):  # fmt: skip
        yield sample(A.einsum.default, equation, [given(*shape) for shape in shapes])


def attention_calls() -> Iterator[Sample]:
    sdpa = A.scaled_dot_product_attention.default
    q, k, v = given(1, 2, "T", 4), given(1, 2, "T", 4), given(1, 2, "T", 4)
    yield sample(sdpa, q, k, v)
    yield sample(sdpa, q, k, v, None, 0.0, True)
    for mask in ((1, 1, "T", "T"), ("T", "T"), (1, "T"), (1, 1, 1, "T"), (1, 2, "T", 1)):
        yield sample(sdpa, q, k, v, given(*mask))
        yield sample(sdpa, q, k, v, given(*mask, dtype=torch.bool))
    yield sample(sdpa, given(1, 4, "T", 4), k, v, None, 0.0, False, enable_gqa=True)
    yield sample(sdpa, given(2, "T", 4), given(2, 6, 4), given(2, 6, 4))
    yield sample(sdpa, given("T", 2, 3, 4), given("T", 2, 5, 4), given("T", 2, 5, 4), None, 0.0, True)
    yield sample(sdpa, given("T", 2, 3, 4), given("T", 2, 5, 4), given("T", 2, 5, 4), given("T", 1, 3, 5))
    yield sample(sdpa, given("T", 2, 3, 4), given(1, 2, 5, 4), given(1, 2, 5, 4), given(3, 5))
    yield sample(sdpa, given(2, "T", 3, 4), given(2, "T", 5, 4), given(2, "T", 5, 4))
    yield sample(sdpa, q, q, q)
    yield sample(sdpa, q, k, k)
    yield sample(sdpa, given("T", 4), given(5, 4), given(5, 4))


def attend_calls() -> Iterator[Sample]:
    from pcp_passes.attention import attend_op

    f32 = torch.float32
    q, k, v = given(1, 4, "T", 8, dtype=f32), given(1, 2, "T", 8, dtype=f32), given(1, 2, "T", 8, dtype=f32)
    positions = ints("T", high="T")
    for options in ({}, {"left": 2}, {"chunk": 2}, {"softcap": 2.0}, {"right": -1}):
        yield sample(attend_op, q, k, v, positions, scale=0.5, **options)
    yield sample(attend_op, q, k, v, positions, scale=0.5, sinks=given(4, dtype=f32))
    yield sample(attend_op, q, k, v, positions, scale=0.5, slopes=given(4, dtype=f32))


def optional_calls() -> Iterator[Sample]:
    """Element-wise calls with arguments that have no value by themselves."""
    x, y = given("T", 3), given(2, "T", 1)
    for name in ("clamp", "clip"):
        target = getattr(A, name)
        yield sample(target.default, x, 0.1)
        yield sample(target.default, y, None, 0.5)
        yield sample(target.Tensor, x, given(3), given("T", 1))
        yield sample(target.Tensor, given(3), None, y)
    for mode in ("floor", "trunc", None):
        yield sample(A.div.Tensor_mode, x, y, rounding_mode=mode)
        yield sample(A.div.Scalar_mode, x, 2, rounding_mode=mode)
    yield sample(A.gelu.default, x, approximate="tanh")
    yield sample(A._to_copy.default, x, dtype=torch.float32)
    yield sample(A.clone.default, y, memory_format=torch.contiguous_format)
    yield sample(A.native_dropout.default, x, 0.5, False)


FAMILIES: dict[str, Any] = {
    "views": view_calls, "reshape": reshape_calls, "along": along_calls, "norms": norm_calls, "products": product_calls,
    "attention": attention_calls, "attend": attend_calls, "indexing": indexing_calls, "joining": joining_calls,
    "twice": twice_calls, "optional": optional_calls,
}  # fmt: skip
