# SPDX-License-Identifier: Apache-2.0
"""Attention written out: ``matmul(softmax(matmul(q, k.T) * scale + mask), v)`` and its variants.

Read from the softmax in both directions. Every value between the two products must be read by the next step alone:
a weight that the model also returns has to exist anyway. Steps that may occur:

- from the logits on: scale (``mul``, ``div``), soft cap (``c * tanh(x / c)``), masks and ALiBi (``add``, ``where``,
  ``masked_fill``), in that order; casts and views; ``baddbmm`` with the bias as its input; a column of sinks joined on;
  the row maximum taken off;
- from the softmax on: the column of sinks cut off, casts, views, a dropout that does nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.index.ops import Values
from pcp_passes.ir.index.values import HIDDEN, HIDDEN_HALF
from pcp_passes.passes.tokens.match_attention import Attention, misfit, ungrouped
from pcp_passes.passes.tokens.match_bias import Bias, head_dim, join, number_of, read_bias, read_mask

_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")
_SAME = ("aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous", "aten::detach", "aten::alias")
_PRODUCTS = ("aten::matmul", "aten::bmm")
_NO_USE = ("aten::_assert_tensor_metadata",)


class _Differs(Exception):
    """The reason why a softmax is no attention that can be told by positions."""


@dataclass(frozen=True)
class _Logits:
    q: fx.Node
    keys: fx.Node
    """``[..., D, T]``."""
    scale: float = 1.0
    softcap: float = 0.0
    bias: Bias | None = None


def match_softmax(node: fx.Node, values: Values) -> Attention | str | None:
    """Read attention around a softmax over keys; ``None`` for any other softmax, a string for one that differs."""
    weights = meta.tensor(node)
    logits = rules.named_argument(node, "self")
    if weights is None or weights.dim() not in (3, 4) or not isinstance(logits, fx.Node):
        return None
    tokens, width = weights.shape[-2:]
    sunk = _is_one_more(width, tokens)
    if rules.named_argument(node, "dim") not in (-1, weights.dim() - 1) or not fakes.is_plain_symbol(tokens):
        return None
    if not sunk and not fakes.same_size(width, tokens):
        return None
    try:
        return _read(node, logits, values, sunk)
    except _Differs as error:
        return str(error)


def _is_one_more(width: Any, tokens: Any) -> bool:
    return isinstance(width, torch.SymInt) and bool(width.node.expr == tokens.node.expr + 1)


def _read(node: fx.Node, at: fx.Node, values: Values, sunk: bool) -> Attention:
    at = _without_maximum(at)
    sinks = None
    if sunk:
        at, sinks = _without_sinks(at)
    found = _logits(at, values)
    out, v = _weighted(node, sunk)
    keys, keys_last = found.keys, True
    if rules.op_name(keys) == "aten::transpose" and _swaps_last(keys):
        keys, keys_last = rules.named_argument(keys, "self"), False
    q = found.q
    if len({_rank(one) for one in (q, keys, v)}) > 1:
        q, keys, v = (_unmerged(one) for one in (q, keys, v))
    if not keys_last:
        keys, v = ungrouped(keys, v)
    wrong = misfit(q, keys, v, keys_last)
    if wrong:
        raise _Differs(wrong)
    heads = _heads(q)
    bias = found.bias or Bias()
    for name, vector in (("sinks", sinks), ("slopes", bias.slopes)):
        held = meta.tensor(vector)
        if held is not None and held.numel() != heads:
            raise _Differs(f"its {name} %{vector} are {held.numel()}, its heads {heads}")
    return Attention(
        out,
        q,
        keys,
        v,
        found.scale,
        bias.visible,
        sinks,
        found.softcap,
        bias.slopes,
        bias.slope_factor,
        keys_last,
    )


def _heads(q: fx.Node) -> int:
    held = meta.tensor(q)
    assert held is not None
    return int(held.shape[-3])


def _rank(node: fx.Node) -> int:
    held = meta.tensor(node)
    return 0 if held is None else held.dim()


def _unmerged(node: fx.Node) -> fx.Node:
    """The ``[B, H, ...]`` that a view merged to ``[B * H, ...]``; the order of the elements is the same."""
    merged = _rank(node) == 3 and rules.op_name(node) in _VIEWS and _rank(_operand(node)) == 4
    return _kept_rows(node) if merged else node


# From the softmax back to the product of queries and keys


def _logits(node: fx.Node, values: Values) -> _Logits:
    name = rules.op_name(node)
    _sole(node)
    if name in _PRODUCTS:
        q, keys = node.args[:2]
        assert isinstance(q, fx.Node) and isinstance(keys, fx.Node)
        return _Logits(q, keys)
    if name == "aten::baddbmm":
        return _biased_product(node, values)
    if name in _SAME:
        return _logits(_operand(node), values)
    if name in _VIEWS:
        return _logits(_kept_rows(node), values)
    if name in ("aten::mul", "aten::div"):
        return _scaled(node, values, name == "aten::div")
    if name == "aten::add":
        return _added(node, values)
    if name in ("aten::masked_fill", "aten::where"):
        return _hidden(node, values)
    if name in ("aten::maximum", "aten::max"):
        return _bounded(node, values)
    raise _Differs(f"%{node.name} ({name.replace('::', '.') or node.op}) between the products is not read")


def _biased_product(node: fx.Node, values: Values) -> _Logits:
    added, q, keys = node.args[:3]
    assert isinstance(added, fx.Node) and isinstance(q, fx.Node) and isinstance(keys, fx.Node)
    beta, alpha = (rules.named_argument(node, name) for name in ("beta", "alpha"))
    bias = _good(read_bias(added, values)) if beta != 0 else Bias()
    times = float(1 if beta is None else beta)
    return _Logits(q, keys, float(1 if alpha is None else alpha), bias=_times(node, bias, times) if beta != 0 else None)


def _scaled(node: fx.Node, values: Values, divides: bool) -> _Logits:
    inner, factor = rules.named_argument(node, "self"), rules.named_argument(node, "other")
    if not divides and number_of(inner, values) is not None:
        inner, factor = factor, inner
    number = number_of(factor, values)
    if number is None or number <= 0 or not isinstance(inner, fx.Node):
        raise _Differs(f"%{node.name} scales by %{factor}, which is no positive constant")
    number = 1.0 / number if divides else number
    if rules.op_name(inner) == "aten::tanh":
        return _capped(inner, values, number)
    found = _logits(inner, values)
    if found.softcap:
        raise _Differs(f"%{node.name} scales logits that are capped already")
    bias = None if found.bias is None else _times(node, found.bias, number)
    return replace(found, scale=found.scale * number, bias=bias)


def _times(node: fx.Node, bias: Bias, number: float) -> Bias:
    scaled = bias.scaled(number) if number > 0 else None
    if scaled is None:
        raise _Differs(f"%{node.name} multiplies a mask by {number}: what is left may not hide")
    return scaled


def _capped(node: fx.Node, values: Values, cap: float) -> _Logits:
    """``cap * tanh(x / cap)``: the factor in front must undo the one inside."""
    _sole(node)
    inner = _operand(node)
    if rules.op_name(inner) not in ("aten::div", "aten::mul"):
        raise _Differs(f"%{node.name} caps logits without a division before")
    number = number_of(rules.named_argument(inner, "other"), values)
    if number is None or (1.0 / number if rules.op_name(inner) == "aten::mul" else number) != cap:
        raise _Differs(f"%{node.name} caps at {cap}, its operand is scaled by another number")
    _sole(inner)
    found = _logits(_operand(inner), values)
    if found.bias is not None or found.softcap:
        raise _Differs(f"%{node.name} caps logits that are masked or capped already")
    return replace(found, softcap=cap)


def _added(node: fx.Node, values: Values) -> _Logits:
    if rules.named_argument(node, "alpha") not in (None, 1):
        raise _Differs(f"%{node.name} adds a multiple")
    a, b = (rules.named_argument(node, name) for name in ("self", "other"))
    if not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        raise _Differs(f"%{node.name} adds a number to the logits")
    if a in values or not _leads_to_product(a):
        a, b = b, a
    found = _logits(a, values)
    return _joined(found, read_bias(b, values))


def _leads_to_product(node: fx.Node) -> bool:
    """Whether a product of two activations is the next thing that is neither a bias nor a change of the logits."""
    seen: list[fx.Node] = [node]
    for _ in range(16):
        if not seen:
            return False
        at = seen.pop()
        if rules.op_name(at) in (*_PRODUCTS, "aten::baddbmm"):
            return True
        seen += [one for one in at.all_input_nodes if meta.tensor(one) is not None and _is_square(one)]
    return False


def _is_square(node: fx.Node) -> bool:
    held = meta.tensor(node)
    return held is not None and held.dim() >= 3 and fakes.same_size(held.shape[-1], held.shape[-2])


def _hidden(node: fx.Node, values: Values) -> _Logits:
    """``masked_fill(x, hide, low)`` and ``where(show, x, low)``."""
    where = rules.op_name(node) == "aten::where"
    mask = rules.named_argument(node, "condition" if where else "mask")
    inner = rules.named_argument(node, "self")
    low = number_of(rules.named_argument(node, "other" if where else "value"), values)
    hides = not where
    if where and low is None:
        low, inner, hides = number_of(inner, values), rules.named_argument(node, "other"), True
    held = meta.tensor(node)
    assert held is not None
    lowest = HIDDEN_HALF if held.dtype == torch.float16 else HIDDEN
    if low is None or low > lowest:
        raise _Differs(f"%{node.name} puts {low} where a key is hidden; required a number no softmax can see")
    if mask not in values:
        raise _Differs(str(read_bias(mask, values)))
    bias = read_mask(mask, values, hides)
    return _joined(_logits(inner, values), bias if isinstance(bias, str) else replace(bias, low=low))


def _bounded(node: fx.Node, values: Values) -> _Logits:
    """``max(x, low)``: what is hidden is raised to a number that hides as well."""
    low = number_of(rules.named_argument(node, "other"), values)
    if low is None or low > HIDDEN:
        raise _Differs(f"%{node.name} bounds the logits from below")
    return _logits(_operand(node), values)


def _joined(found: _Logits, bias: Bias | str) -> _Logits:
    return replace(found, bias=_good(join(found.bias or Bias(), _good(bias))))


def _good(bias: Bias | str) -> Bias:
    if isinstance(bias, str):
        raise _Differs(bias)
    return bias


def _without_maximum(node: fx.Node) -> fx.Node:
    """The logits of ``x - max(x)``: a softmax does not see what is taken off a whole row."""
    if rules.op_name(node) != "aten::sub":
        return node
    inner, source = (rules.named_argument(node, name) for name in ("self", "other"))
    if rules.op_name(source) == "operator::getitem" and source.args[1] == 0:
        source = source.args[0]
    if rules.op_name(source) not in ("aten::max", "aten::amax") or rules.named_argument(source, "self") is not inner:
        raise _Differs(f"%{node.name} takes something off the logits that is not their row maximum")
    last, held = rules.named_argument(source, "dim"), meta.tensor(inner)
    dims = list(last) if isinstance(last, (list, tuple)) else [last]
    if held is None or not rules.named_argument(source, "keepdim") or dims not in ([-1], [held.dim() - 1]):
        raise _Differs(f"%{source.name} is no maximum of each row")
    _sole(node)
    assert isinstance(inner, fx.Node)
    _sole(inner, source)
    return inner


def _without_sinks(node: fx.Node) -> tuple[fx.Node, fx.Node]:
    """The logits and the sinks of ``cat([logits, sinks], -1)``."""
    while rules.op_name(node) in _SAME:
        _sole(node)
        node = _operand(node)
    held = meta.tensor(node)
    parts = rules.named_argument(node, "tensors") if rules.op_name(node) == "aten::cat" else []
    if held is None or len(parts) != 2 or rules.named_argument(node, "dim") not in (-1, held.dim() - 1):
        raise _Differs(f"%{node.name} has one more key than tokens, but no column of sinks is joined on")
    logits, sinks = parts
    column = meta.tensor(sinks)
    if column is None or not fakes.same_size(column.shape[-1], 1):
        raise _Differs(f"%{sinks.name} is no column of sinks")
    while rules.op_name(sinks) in ("aten::expand", *_SAME):
        sinks = _operand(sinks)
    if head_dim(sinks, exact=False) != -3:
        raise _Differs(f"%{sinks.name} is not one sink per head")
    return logits, sinks


# From the softmax on to the product of weights and values


def _weighted(node: fx.Node, sunk: bool) -> tuple[fx.Node, fx.Node]:
    while True:
        users = [user for user in node.users if rules.op_name(user) not in _NO_USE]
        if len(users) != 1:
            raise _Differs(f"its weights %{node.name} are read by {len(users)} nodes, not by one product alone")
        user = users[0]
        name = rules.op_name(user)
        if name in _PRODUCTS:
            weights, v = user.args[:2]
            if weights is not node or not isinstance(v, fx.Node) or v is node or sunk:
                raise _Differs(f"%{user.name} is no product of weights and values")
            return user, v
        if name in _VIEWS:
            _kept_rows(user)
        elif name == "aten::slice" and sunk:
            sunk = not _cuts_sinks(user)
        elif name == "aten::dropout":
            if not drops_nothing(user):
                raise _Differs("it drops out attention weights at random; call model.eval() first")
        elif name not in _SAME:
            raise _Differs(f"its weights go through %{user.name} ({name.replace('::', '.') or user.op})")
        node = user


def _cuts_sinks(node: fx.Node) -> bool:
    """Whether the node keeps all columns but the last."""
    held, source = meta.tensor(node), meta.tensor(rules.named_argument(node, "self"))
    assert held is not None and source is not None
    dim, start, step = (rules.named_argument(node, name) for name in ("dim", "start", "step"))
    last = dim in (-1, held.dim() - 1) and start in (None, 0) and step in (None, 1)
    if not last and [str(s) for s in held.shape] != [str(s) for s in source.shape]:
        raise _Differs(f"%{node.name} cuts the weights otherwise than at their sinks")
    return last and fakes.same_size(held.shape[-1], held.shape[-2])


# Shared


def drops_nothing(node: fx.Node) -> bool:
    """Whether the node is a dropout that passes its operand on."""
    if rules.op_name(node) != "aten::dropout":
        return False
    return not rules.named_argument(node, "train") or rules.named_argument(node, "p") == 0


def _operand(node: fx.Node) -> fx.Node:
    found = node.args[0]
    assert isinstance(found, fx.Node)
    return found


def _sole(node: fx.Node, *also: fx.Node) -> None:
    """Require that one step alone reads a value; ``also`` are further readers that are part of the attention."""
    users = [user for user in node.users if rules.op_name(user) not in _NO_USE and user not in also]
    if len(users) != 1:
        raise _Differs(f"%{node.name} is read by {len(users)} nodes, not by its attention alone")


def _kept_rows(node: fx.Node) -> fx.Node:
    """The operand of a view that merges or splits batch and heads and keeps rows and keys."""
    source = _operand(node)
    held, inner = meta.tensor(node), meta.tensor(source)
    assert held is not None and inner is not None
    if not all(fakes.same_size(held.shape[d], inner.shape[d]) for d in (-1, -2)):
        raise _Differs(f"%{node.name} views rows and keys as something else")
    return source


def _swaps_last(node: fx.Node) -> bool:
    held = meta.tensor(node)
    assert held is not None
    dims = {rules.named_argument(node, name) % held.dim() for name in ("dim0", "dim1")}
    return dims == {held.dim() - 1, held.dim() - 2}
