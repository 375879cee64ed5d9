# SPDX-License-Identifier: Apache-2.0
"""Attention as models spell it in ATen, read as operands of ``pcp::attend``. Nothing here changes a graph."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from pcp_passes.ir import fakes, meta, rules
from pcp_passes.ir.index.ops import Values
from pcp_passes.ir.index.values import Visible
from pcp_passes.passes.tokens.match_bias import Bias, read_bias

_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")
_COPIES = ("aten::clone", "aten::contiguous")


@dataclass(frozen=True)
class Attention:
    """``attend(q, k, v, arange(T), ...)`` computes what ``node`` computes.

    Attributes:
        node: the node to replace, ``[B, Hq, T, Dv]``.
        q, k, v: ``[B, Hq, T, D]``, ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``; or all, and ``node``, without ``B``.
        scale: factor of the logits.
        visible: the keys a query sees.
        sinks: one extra logit per head: a tensor of Hq elements, or ``None``.
        softcap: ``c * tanh(logit / c)`` on the scaled logit; 0 for none.
        slopes: ALiBi: a tensor of Hq elements, or ``None``.
        slope_factor: what the slopes are multiplied by.
        keys_last: ``k`` is ``[B, Hkv, D, T]``.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    scale: float
    visible: Visible
    sinks: fx.Node | None = None
    softcap: float = 0.0
    slopes: fx.Node | None = None
    slope_factor: float = 1.0
    keys_last: bool = False


def match_sdpa(node: fx.Node, values: Values) -> Attention | str:
    """Read ``aten.scaled_dot_product_attention``; a string says why it cannot be told by positions."""
    q, k, v = (rules.named_argument(node, name) for name in ("query", "key", "value"))
    if rules.named_argument(node, "dropout_p"):
        return "it drops out attention weights at random; call model.eval() first"
    grouped = bool(rules.named_argument(node, "enable_gqa"))
    held_q, held_k = meta.tensor(q), meta.tensor(k)
    assert held_q is not None and held_k is not None, f"%{node.name} has operands without values"
    wrong = misfit(q, k, v)
    if wrong:
        return wrong
    if held_q.shape[1] != held_k.shape[1] and not grouped and held_k.shape[1] != 1:
        return f"its {held_q.shape[1]} query heads and {held_k.shape[1]} key heads are not grouped"
    scale = rules.named_argument(node, "scale")
    if scale is None:
        scale = float(held_q.shape[-1]) ** -0.5
    if not isinstance(scale, (int, float)):
        return f"its scale %{scale} is not a constant"
    mask = rules.named_argument(node, "attn_mask")
    bias: Bias | str
    if rules.named_argument(node, "is_causal"):
        bias = Bias(Visible(right=0)) if mask is None else "it has a mask and is_causal"
    else:
        bias = Bias() if mask is None else read_bias(mask, values)
    if isinstance(bias, str):
        return bias
    k, v = ungrouped(k, v)
    return Attention(node, q, k, v, float(scale), bias.visible, slopes=bias.slopes, slope_factor=bias.slope_factor)


def misfit(q: fx.Node, k: fx.Node, v: fx.Node, keys_last: bool = False) -> str:
    """What keeps the operands from being self-attention of the token rows; empty when nothing does."""
    held = [meta.tensor(one) for one in (q, k, v)]
    a, b, c = (_Operand.of(one) for one in held)
    if keys_last and b is not None:
        b = replace(b, shape=(*b.shape[:2], b.shape[3], b.shape[2]))
    if a is None or b is None or c is None or len({one.dim() for one in held if one is not None}) > 1:
        return "its operands are not [batch, heads, tokens, channels]"
    if not fakes.is_plain_symbol(a.shape[2]):
        return f"it has {a.shape[2]} queries, which is not the token count"
    if not (fakes.same_size(a.shape[2], b.shape[2]) and fakes.same_size(a.shape[2], c.shape[2])):
        return f"it has {a.shape[2]} queries and {b.shape[2]} keys"
    fixed = (*a.shape[:2], a.shape[3], *b.shape[:2], b.shape[3], *c.shape[:2], c.shape[3])
    if not all(isinstance(size, int) for size in fixed):
        return "its batch, heads or channels have no fixed size"
    if not (a.shape[0] == b.shape[0] == c.shape[0] and b.shape[1] == c.shape[1] and a.shape[3] == b.shape[3]):
        return "its operands are broadcast against each other"
    if not a.dtype == b.dtype == c.dtype or not a.dtype.is_floating_point:
        return f"its operands are {a.dtype}, {b.dtype} and {c.dtype}"
    return "" if a.shape[1] % b.shape[1] == 0 else f"{a.shape[1]} query heads over {b.shape[1]} key heads"


@dataclass(frozen=True)
class _Operand:
    shape: tuple[Any, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, held: torch.Tensor | None) -> _Operand | None:
        if held is None or held.dim() not in (3, 4):
            return None
        return cls((1,) * (4 - held.dim()) + tuple(held.shape), held.dtype)


def ungrouped(k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Keys and values before their heads were repeated, when both were repeated alike."""
    one, other = unrepeated(k), unrepeated(v)
    held_k, held_v = meta.tensor(one), meta.tensor(other)
    assert held_k is not None and held_v is not None
    return (one, other) if held_k.shape[1] == held_v.shape[1] else (k, v)


def unrepeated(node: fx.Node) -> fx.Node:
    """The operand whose heads ``node`` repeats, each ``n`` times in a row; ``node`` itself when it repeats none.

    Read are ``repeat_interleave(x, n, 1)`` and ``reshape(expand(x[:, :, None], [B, H, n, T, D]), [B, H * n, T, D])``.
    """
    out = meta.tensor(node)
    if rules.op_name(node) == "aten::repeat_interleave":
        source, dim = rules.named_argument(node, "self"), rules.named_argument(node, "dim")
        held = meta.tensor(source)
        times = rules.named_argument(node, "repeats")
        return source if held is not None and held.dim() == 4 and dim in (1, -3) and isinstance(times, int) else node
    step = node
    if rules.op_name(step) not in _VIEWS:
        return node
    step = step.all_input_nodes[0]
    if rules.op_name(step) in _COPIES:
        step = step.all_input_nodes[0]
    wide = meta.tensor(step)
    if rules.op_name(step) != "aten::expand" or wide is None or out is None or wide.dim() != 5 or out.dim() != 4:
        return node
    inner = step.all_input_nodes[0]
    source = inner.all_input_nodes[0] if rules.op_name(inner) == "aten::unsqueeze" else None
    if source is None or rules.named_argument(inner, "dim") not in (2, -3):
        return node
    held = meta.tensor(source)
    if held is None or held.dim() != 4:
        return node
    kept = zip((0, 1, 3, 4), range(4), strict=True)
    if not all(fakes.same_size(wide.shape[d], held.shape[e]) for d, e in kept):
        return node
    joined = isinstance(wide.shape[1], int) and isinstance(wide.shape[2], int)
    same = joined and out.shape[1] == wide.shape[1] * wide.shape[2]
    return source if same and all(fakes.same_size(out.shape[d], held.shape[d]) for d in (0, 2, 3)) else node
