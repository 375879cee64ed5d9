# SPDX-License-Identifier: Apache-2.0
"""Closed forms of what ATen ops make out of nothing: ranges, fills; and of tensors whose elements are known."""

from __future__ import annotations

import math

import torch

from pcp_passes.ir import fakes
from pcp_passes.ir import predicates as p
from pcp_passes.ir.index.ops import COUNTING, Call, Handler, integer, number
from pcp_passes.ir.predicates import Expr, Unknown

_MAX_ELEMENTS = 1 << 22


def _arange(call: Call) -> Expr:
    start, step = (integer(call.argument(name, default)) for name, default in (("start", 0), ("step", 1)))
    if not p.is_constant(step):
        raise Unknown("step")
    return p.combine(start, p.index(0), int(step.const))


def _filled(value: p.Number | None) -> Handler:
    def handler(call: Call) -> Expr:
        return number(call.argument("fill_value", False)) if value is None else p.constant(value)

    return handler


def _scalar(call: Call) -> Expr:
    return number(call.argument("s"))


def _fill(call: Call) -> Expr:
    return call.operand("value")


def of_constant(tensor: torch.Tensor) -> Expr:
    """The closed form of a tensor with known elements: all equal, an even range along the last dim, or a triangle.

    Raises:
        Unknown: it is none of these, is too large to look at, or has no elements here.
    """
    readable = not tensor.is_complex() and not tensor.is_meta and fakes.fake_mode_of(tensor) is None
    if tensor.numel() > _MAX_ELEMENTS or not readable:
        raise Unknown("constant")
    if not tensor.numel():
        return p.ZERO
    tensor = tensor.detach()
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        value = first.item()
        return number(value) if isinstance(value, bool) else p.constant(value)
    last = tensor.dim() - 1
    if tensor.dtype in COUNTING and last >= 0 and tensor.shape[-1] > 1:
        ramp = _ramp(tensor)
        if ramp is not None:
            return p.combine(p.constant(ramp[0]), p.index(last), ramp[1])
    if tensor.dim() >= 2:
        rows, columns = (torch.arange(tensor.shape[d], device=tensor.device) for d in (-2, -1))
        inside = (columns <= rows[:, None]).expand(tensor.shape)
        corner, outer = tensor[inside].unique(), tensor[~inside].unique()
        if corner.numel() == outer.numel() == 1:
            lower = p.ge(p.combine(p.index(last - 1), p.index(last), -1))
            if tensor.dtype == torch.bool:
                return lower if bool(corner[0]) else p.negate(lower)
            return p.choose(lower, p.constant(corner[0].item()), p.constant(outer[0].item()))
    raise Unknown("constant")


def _ramp(tensor: torch.Tensor) -> tuple[int, int] | None:
    row = tensor.reshape(-1, tensor.shape[-1])[0]
    start, step = row[0].item(), (row[1] - row[0]).item()
    if not all(math.isfinite(x) and x == int(x) for x in (start, step)):
        return None
    even = torch.arange(row.shape[0], device=row.device, dtype=row.dtype) * step + start
    return (int(start), int(step)) if bool((tensor == even).all()) else None


SOURCES: dict[str, Handler] = {
    "arange": _arange,
    "full": _filled(None),
    "full_like": _filled(None),
    "new_full": _filled(None),
    "ones": _filled(1),
    "ones_like": _filled(1),
    "new_ones": _filled(1),
    "zeros": _filled(0),
    "zeros_like": _filled(0),
    "new_zeros": _filled(0),
    "scalar_tensor": _scalar,
    "fill": _fill,
}
"""Ops that make elements, by their ATen name."""
