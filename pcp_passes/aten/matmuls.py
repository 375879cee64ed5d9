# SPDX-License-Identifier: Apache-2.0
"""Matrix products: local in the rows of one operand or in a batch dimension; a contraction over tokens is not."""

from __future__ import annotations

from typing import Any

from torch import fx

from pcp_passes.aten.decision import REPLICATE, Call, Decision, Local, Mixes, tensor_of
from pcp_passes.ir.placements import Placement, Shard


def linear(call: Call) -> Decision:
    """``linear(x, weight, bias)``: any dimension of ``x`` but the last."""
    x, where = call.operands[0], call.at(call.operands[0])
    if not isinstance(where, Shard):
        return Mixes("its weight depends on tokens")
    if where.dim == tensor_of(x).dim() - 1:
        return Mixes("contracts over tokens")
    if any(tensor_of(bias).dim() != 1 for bias in call.operands[2:]):
        return Mixes("adds a bias that is not one row")
    # A weight made from tokens (not a parameter) is needed whole.
    return _from_first(call, x, where, where)


def _from_first(call: Call, x: fx.Node, where: Shard, out: Placement) -> Decision:
    if call.operands.count(x) > 1:
        return Mixes("multiplies a tensor of token rows by itself")
    return Local(out, call.needs({x: where}))


def matmul(call: Call) -> Decision:
    """``mm``, ``bmm``, ``matmul``: ``a[..., n, c] @ b[..., c, m]``."""
    return _product(call, 0)


def addmm(call: Call) -> Decision:
    """``addmm``, ``baddbmm``: a product added to a broadcast operand."""
    bias = call.operands[0]
    found = _product(call, 1)
    if not isinstance(found, Local):
        return found
    out = found.out
    assert isinstance(out, Shard)
    rank = tensor_of(call.node).dim()
    needed = call.as_rows(bias, out.dim - rank, out)
    if needed is None:
        return Mixes("adds an operand with another number of rows")
    return Local(out, (needed, *found.needs[1:]))


def _product(call: Call, first: int) -> Decision:
    """Rows of ``a`` decide; then batch dimensions; then columns of ``b``. The other operand is restored as needed.

    ``first`` is the place of ``a`` among the operands; ``b`` follows it.
    """
    a, b = call.operands[first : first + 2]
    rank_a, rank_b = tensor_of(a).dim(), tensor_of(b).dim()
    if rank_a < 2 or rank_b < 2:
        return Mixes("a product with a vector has no rule")
    rank = max(rank_a, rank_b)
    at_a, at_b = call.at(a), call.at(b)
    back_a = at_a.dim - rank_a if isinstance(at_a, Shard) else None
    back_b = at_b.dim - rank_b if isinstance(at_b, Shard) else None
    if isinstance(at_a, Shard) and back_a == -2:
        return _needs(call, first, at_a, REPLICATE, Shard(rank - 2, at_a.outer, at_a.inner))
    for where, back in ((at_a, back_a), (at_b, back_b)):
        if isinstance(where, Shard) and back is not None and back < -2:
            return _batch(call, first, where, back, rank)
    if isinstance(at_b, Shard) and back_b == -1:
        return _needs(call, first, REPLICATE, at_b, Shard(rank - 1, at_b.outer, at_b.inner))
    return Mixes("contracts over tokens")


def _batch(call: Call, first: int, where: Shard, back: int, rank: int) -> Decision:
    wanted: list[Placement] = []
    for operand in call.operands[first : first + 2]:
        needed = call.as_rows(operand, back, where)
        if needed is None:
            return Mixes("multiplies batches of different numbers of rows")
        wanted.append(needed)
    return _needs(call, first, wanted[0], wanted[1], Shard(rank + back, where.outer, where.inner))


def _needs(call: Call, first: int, at_a: Placement, at_b: Placement, out: Placement) -> Decision:
    found: list[Placement] = [REPLICATE] * len(call.operands)
    found[first], found[first + 1] = at_a, at_b
    return Local(out, tuple(found))


def einsum(call: Call) -> Decision:
    """``einsum(equation, operands)``: local when the tokens' letter is in the result."""
    equation: str = str(call.arg("equation")).replace(" ", "")
    members = call.operands
    if "->" not in equation or "." in equation:
        return Mixes("an einsum without '->', or with '...', has no rule")
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    if len(terms) != len(members) or any(len(set(term)) != len(term) for term in (*terms, output)):
        return Mixes("an einsum with a repeated letter has no rule")
    for member, term in zip(members, terms, strict=True):
        where = call.at(member)
        if isinstance(where, Shard) and term[where.dim] in output:
            return _einsum_on(call, terms, output, term[where.dim], where)
    return Mixes("contracts over tokens")


def _einsum_on(call: Call, terms: list[str], output: str, letter: str, where: Shard) -> Decision:
    needed: list[Any] = []
    for member, term in zip(call.operands, terms, strict=True):
        if letter not in term:
            needed.append(REPLICATE)
            continue
        dim = term.index(letter)
        found = call.as_rows(member, dim - tensor_of(member).dim(), where)
        if found is None:
            return Mixes("an einsum over different numbers of rows has no rule")
        needed.append(found)
    return Local(Shard(output.index(letter), where.outer, where.inner), tuple(needed))


def attention(call: Call) -> Decision:
    """``scaled_dot_product_attention(q, k, v, mask)``: rows of ``q`` with all keys, or a batch dimension of all three.

    A call with ``is_causal`` counts its rows from 0, which a rank's rows are not: ``localize-attention`` gives them
    their positions.
    """
    q, k, v = call.operands[:3]
    where = call.at(q)
    if not isinstance(where, Shard):
        return Mixes("its queries are not sharded")
    if call.arg("dropout_p"):
        return Mixes("draws random numbers: ranks would draw different ones; call model.eval() first")
    rank = tensor_of(q).dim()
    back = where.dim - rank
    if back == -1 or (len({q, k, v}) < 3 and back == -2 and q in (k, v)):
        return Mixes("attends with the tokens as channels, or with queries that are also its keys")
    if back == -2 and call.arg("is_causal"):
        return Mixes("is causal by row number; the rows of a rank are not consecutive from 0")
    mask = call.arg("attn_mask")
    members = [k, v] if back != -2 else []
    needed: dict[fx.Node, Placement] = {q: where}
    for member in [*members, *([mask] if isinstance(mask, fx.Node) else [])]:
        found = call.as_rows(member, back, where)
        if found is None:
            return Mixes("an operand has another number of rows")
        needed[member] = found
    return Local(Shard(where.dim, where.outer, where.inner), call.needs(needed))


def attend(call: Call) -> Decision:
    """``pcp::attend(q, k, v, positions)``: rows of ``q`` at their positions, with all keys; or a batch dimension."""
    q, k, v, positions = call.operands[:4]
    where = call.at(q)
    if not isinstance(where, Shard) or where.dim != 2 or (where.outer, where.inner) != (1, 1) or q in (k, v):
        return Mixes("its queries are not sharded by rows")
    return Local(Shard(2), call.needs({q: where, positions: Shard(0)}))
