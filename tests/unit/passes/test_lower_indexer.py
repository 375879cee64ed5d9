# SPDX-License-Identifier: Apache-2.0
"""lower-indexer and lower-sparse-attention: every spelling, what differs, and that a wrong rewrite is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from pcp_passes.ir import invariants
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes.tokens.lower_indexer import LowerIndexer
from pcp_passes.passes.tokens.lower_sparse_attention import LowerSparseAttention
from pcp_passes.sparse.ops import select_keys_op, sparse_attend_heads_op, sparse_attend_op
from tests import sparse_programs as programs
from tests.attention_programs import CTX, captured, squares
from tests.sparse_programs import INF, TOPK, Model, Tensor

pytestmark = pytest.mark.unit

LENGTHS = (5, 9, 33)
CLOSE = 2e-5
"""Outputs are near 1; sound rewrites differ by under 2e-6, the sabotaged ones by over 1e-2."""


def lowered(model: Callable[..., Any], *operands: Tensor) -> tuple[fx.GraphModule, list[str], tuple[int, int]]:
    """The rewritten program, all notes, and what each of the two passes rewrote."""
    gm = captured(model, *(operands or programs.operands(9)))
    first = LowerIndexer().run(gm.graph, CTX)
    second = LowerSparseAttention().run(gm.graph, CTX)
    gm.recompile()
    invariants.well_formed(gm.graph, CTX)
    invariants.meta_fresh_full(gm.graph, CTX)
    return gm, [str(one) for one in (*first.notes, *second.notes)], (first.rewrites, second.rewrites)


def worst(gm: fx.GraphModule, model: Callable[..., Any], lengths: tuple[int, ...] = LENGTHS, batch: int = 1) -> float:
    """Largest difference at several token counts; a selection of 5 keys is all, or a few."""
    return max(float((gm(*o) - model(*o)).abs().max()) for o in (programs.operands(n, batch) for n in lengths))


def only(gm: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = (node for node in gm.graph.nodes if node.target is target)
    return node


def replaced(node: fx.Node, **options: Any) -> None:
    node.kwargs = {**node.kwargs, **options}
    node.graph.owning_module.recompile()  # type: ignore[union-attr]


PARTS = {"scores": programs.SCORES, "masked": programs.MASKED, "select": programs.SELECT, "attend": programs.ATTEND}
SPELLINGS: dict[str, Model] = {}
for number in range(max(map(len, PARTS.values()))):
    chosen = {part: list(forms.items())[number % len(forms)] for part, forms in PARTS.items()}
    SPELLINGS[", ".join(name for name, _ in chosen.values())] = Model(
        **{part: one for part, (_, one) in chosen.items()}
    )


@pytest.mark.parametrize("name", SPELLINGS)
def test_every_spelling_is_read(name: str) -> None:
    model = SPELLINGS[name]
    gm, notes, counts = lowered(model)
    assert counts == (1, 1), notes
    assert not squares(gm), "something of size T x T is left"
    assert only(gm, select_keys_op).args[4:] == (TOPK, "local")
    assert only(gm, sparse_attend_op)
    assert worst(gm, model) < CLOSE


@pytest.mark.parametrize("scores", [programs.matmuls, programs.heads_first])
def test_batches(scores: programs.Scores) -> None:
    model = Model(scores=scores)
    gm, notes, counts = lowered(model, *programs.operands(9, 2))
    assert counts == (1, 1), notes
    assert worst(gm, model, batch=2) < CLOSE


def test_keys_may_be_copied_into_an_empty_tensor() -> None:
    model = Model(expand=programs.copied)
    gm, notes, counts = lowered(model)
    assert counts == (1, 1) and "over latents" in notes[-1], notes
    assert worst(gm, model) < CLOSE


def test_rotary_channels_may_come_first() -> None:
    def model(q: Tensor, *rest: Tensor) -> Tensor:
        return Model(expand=programs.rope_first)(q.roll(programs.ROPE, -1), *rest)

    gm, notes, counts = lowered(model)
    assert counts == (1, 1) and "over latents" in notes[-1]
    assert worst(gm, model) < CLOSE


BEFORE = Model(scores=programs.einsums)


def expected(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, *index: Tensor) -> Tensor:
    positions = torch.arange(q.shape[2])
    iq, ik, w = index
    chosen = select_keys_op(iq, ik, w * programs.INDEX_SCALE, positions, TOPK, "local")
    matrix = weight.reshape(-1, programs.NOPE + programs.VALUE, programs.LATENT)
    rotary = rope.unsqueeze(1).squeeze(1)
    nope = torch.matmul(q[..., : programs.NOPE], matrix[:, : programs.NOPE])
    absorbed = torch.cat([nope, q[..., programs.NOPE : programs.NOPE + programs.ROPE]], 3)
    out = sparse_attend_op(absorbed, latent, rotary, chosen, scale=programs.SCALE)
    last = programs.NOPE + programs.VALUE
    return torch.matmul(out, matrix[:, programs.NOPE : last].transpose(1, 2))


def test_before_and_expected() -> None:
    gm, _, _ = lowered(BEFORE)
    want = captured(expected, *programs.operands(9))
    assert calls(gm) == calls(want)
    assert worst(gm, expected) == 0


def calls(gm: fx.GraphModule) -> list[str]:
    """Ops with their constant arguments, in alphabetical order: independent products may come in any."""
    found = []
    for line in print_graph(gm, comments=False, numbered=True).splitlines():
        call = line.partition(" = ")[2]
        if (
            call
            and not call.startswith(("aten.sym_size", "aten.slice.Tensor(%arg3"))
            and "9223372036854775807" not in call
        ):
            found.append(call.partition("(")[0])
    return sorted(found)


def test_two_layers_may_share_a_selection() -> None:
    """A shared layer reads the selection of the layer before, which is one value of the graph."""

    def model(q: Tensor, latent: Tensor, rope: Tensor, weight: Tensor, *index: Tensor) -> Tensor:
        places = torch.arange(q.shape[2])
        causal = places[None, :] <= places[:, None]
        indices = programs.least(programs.MASKED["where"](programs.einsums(*index), causal))
        k, v = programs.joined(latent, rope, weight)
        first = programs.truth(q, k, v, indices, causal)
        return first + programs.shown(q * 2, k, v, indices, causal)

    gm, _, counts = lowered(model)
    assert counts == (1, 2) and not squares(gm)
    assert len({node.args[3] for node in gm.graph.nodes if node.target is sparse_attend_op}) == 1
    assert worst(gm, model) < CLOSE


def biased(latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """A map with a bias is not only a map: the latent cannot stand for its keys."""
    both = F.linear(latent, weight, torch.ones(weight.shape[0])).view(
        1, -1, programs.HEADS, programs.NOPE + programs.VALUE
    )
    nope, v = both.transpose(1, 2).split([programs.NOPE, programs.VALUE], dim=-1)
    return torch.cat([nope, rope.unsqueeze(1).expand(-1, programs.HEADS, -1, -1)], -1), v


def normed(latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k, v = programs.joined(latent, rope, weight)
    return F.normalize(k, dim=-1), v


@pytest.mark.parametrize(("expand", "reason"), [(biased, "without a bias"), (normed, "no part of an expanded latent")])
def test_keys_that_are_no_expansion_stay_expanded(expand: programs.Expand, reason: str) -> None:
    model = Model(expand=expand)
    gm, notes, counts = lowered(model)
    assert counts == (1, 1) and "over expanded keys" in notes[-1] and reason in notes[-1]
    assert only(gm, sparse_attend_heads_op)
    assert worst(gm, model) < CLOSE


def sunk(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    mask = torch.zeros(causal.shape).masked_fill(~causal, programs.LOW)[None, None]
    hidden = torch.ones(1, *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), False)
    logits = torch.matmul(q, k.transpose(2, 3)) * programs.SCALE + mask.masked_fill(hidden.unsqueeze(1), programs.LOW)
    sinks = torch.linspace(-1, 2, programs.HEADS).reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], -1)
    weights = torch.softmax(torch.cat([logits, sinks], -1), -1)[..., :-1]
    return torch.matmul(weights, v)


def test_sinks_are_kept() -> None:
    gm, _, counts = lowered(Model(attend=sunk))
    assert counts == (1, 1) and "sinks" in only(gm, sparse_attend_op).kwargs
    assert worst(gm, Model(attend=sunk)) < CLOSE


# What differs stays, and says where


def sigmoids(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bths,bth->bts", torch.einsum("bthd,bsd->bths", q, k).sigmoid(), w)


def per_head_keys(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    keys = torch.stack([k, k * 2, k * 3, k, k, k], 2)
    return torch.einsum("bths,bth->bts", torch.einsum("bthd,bshd->bths", q, keys).relu(), w)


def relu_last(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bths,bth->bts", torch.einsum("bthd,bsd->bths", q, k), w).relu()


def scaled_down(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return programs.matmuls(q, k, w) * -1.0


def unweighted(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bthd,bsd->bths", q, k).relu().sum(2)


def _relus(change: programs.Select) -> Model:
    return Model(scores=lambda q, k, w: torch.einsum("bths,bth->bts", change(torch.einsum("bthd,bsd->bths", q, k)), w))


def _scores(change: programs.Select) -> Model:
    return Model(scores=lambda q, k, w: change(programs.matmuls(q, k, w)))


def _cut_products(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return (torch.einsum("bthd,bsd->bths", q, k).relu() * w[..., None]).int().sum(2).float()


def _cut_sum(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return (torch.einsum("bthd,bsd->bths", q, k).relu() * w[..., None]).sum(2, dtype=torch.int32).float()


def _window(scores: Tensor, causal: Tensor) -> Tensor:
    places = torch.arange(scores.shape[-1])
    return scores.masked_fill(~(causal & (places[:, None] - places[None, :] < 6)), INF)


NEAR_MISSES: dict[str, tuple[Model, str, str]] = {
    "sigmoid": (Model(scores=sigmoids), "go through relu, and here through aten.sigmoid", "sigmoid"),
    "keys of each head": (Model(scores=per_head_keys), "share the keys", "stack"),
    "relu of the sum": (Model(scores=relu_last), "aten.relu is not read", "relu"),
    "negative scale": (Model(scores=scaled_down), "positive constant", "mul"),
    "scale that is no number": (_scores(lambda s: s * float("nan")), "positive constant", "mul"),
    "infinite scale": (_scores(lambda s: s * -INF), "positive constant", "mul"),
    "rounded quotient": (_scores(lambda s: torch.div(s, 0.5, rounding_mode="floor")), "positive constant", "div"),
    "cut to integers": (_scores(lambda s: s.int().float()), "aten.to is not read", "to"),
    "rounded to bf16": (_scores(lambda s: s.bfloat16().float()), "aten.to is not read", "to"),
    "bits": (
        Model(masked=programs.MASKED["where, turned"], select=lambda s: programs.least(s.view(torch.int32))),
        "aten.view is not read", "view",
    ),
    "products cut to integers": (Model(scores=_cut_products), "aten.to is not read", "to"),
    "summed as integers": (Model(scores=_cut_sum), "aten.to is not read", "to"),
    "relu by the largest": (_relus(lambda x: x.max().expand(x.shape)), "go through relu", "max"),
    "relu that broadcasts": (
        _relus(lambda x: torch.maximum(x[0], torch.zeros_like(x))), "go through relu", "maximum",
    ),
    "mask that broadcasts": (
        Model(masked=lambda s, c: s[0].masked_fill(~c[None], INF)), "aten.masked_fill is not read", "masked_fill",
    ),
    "no weights": (Model(scores=unweighted), "aten.sum is not read", "sum"),
    "no mask": (Model(masked=lambda scores, causal: scores), "would see later keys", "topk"),
    "a window": (Model(masked=_window), "among the keys before it", "masked_fill"),
    "later keys too": (Model(masked=lambda s, c: s.masked_fill(c, INF)), "no window of keys", "masked_fill"),
    "hides with 0": (Model(masked=lambda s, c: s.masked_fill(~c, 0.0)), "which a score may be", "masked_fill"),
    "hides with NaN": (
        Model(masked=lambda s, c: s.masked_fill(~c, float("nan"))), "which a score may be", "masked_fill",
    ),
    "places of a byte": (Model(select=lambda s: programs.least(s).to(torch.uint8)), "marks keys in a mask", "to"),
    "places of a bit": (Model(select=lambda s: programs.least(s).to(torch.bool)), "marks keys in a mask", "to"),
    "the least": (Model(select=lambda s: s.topk(TOPK, largest=False).indices), "best scores", "topk"),
    "a share": (Model(select=lambda s: s.topk(s.shape[-1] // 2).indices), "no constant", "topk"),
    "values too": (
        Model(select=lambda s: s.topk(TOPK).indices + s.topk(TOPK).values.long() * 0), "marks keys in a mask", "add",
    ),
    "gathered": (
        Model(select=lambda s: s.topk(TOPK).indices.flip(-1)), "marks keys in a mask", "flip",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_an_indexer_that_differs_stays_and_says_where(name: str) -> None:
    model, reason, where = NEAR_MISSES[name]
    gm, notes, counts = lowered(model)
    assert counts == (0, 0)
    told = next(one for one in notes if "stays dense" in one)
    assert reason in told and f" = aten.{where}" in told, told
    assert worst(gm, model, (9,)) == 0


def turned(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    """The mask of selected keys, rows and keys exchanged: later keys that the model selects in vain count here."""
    hidden = torch.ones(1, *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), False).transpose(1, 2)
    own = torch.eye(q.shape[2], dtype=torch.bool)
    return F.scaled_dot_product_attention(q, k, v, ((causal & ~hidden) | own).unsqueeze(1), scale=programs.SCALE)


def test_later_keys_that_count_keep_the_indexer_dense() -> None:
    model = Model(attend=turned)
    gm, notes, counts = lowered(model)
    assert counts == (0, 0) and "keys after a row's own have to be hidden" in notes[0]
    assert worst(gm, model) == 0


def near_too(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    """The key before is seen whether it is selected or not."""
    places = torch.arange(q.shape[2])
    hidden = torch.ones(1, *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), False)
    hidden = torch.where(places[:, None] - places[None, :] == 1, False, hidden)
    return F.scaled_dot_product_attention(q, k, v, (causal & ~hidden).unsqueeze(1), scale=programs.SCALE)


def capped(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
    hidden = torch.ones(1, *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), False)
    logits = torch.tanh(torch.matmul(q, k.transpose(2, 3)) * programs.SCALE / 3.0) * 3.0
    return torch.matmul(torch.softmax(logits.masked_fill(~(causal & ~hidden.unsqueeze(1)), INF), -1), v)


@pytest.mark.parametrize("attend", [near_too, capped])
def test_attention_of_another_kind_stays_dense_and_correct(attend: programs.Attend) -> None:
    """The selection is lowered all the same, and marks the same keys."""
    model = Model(attend=attend)
    gm, notes, counts = lowered(model)
    assert counts == (1, 0), notes
    assert any("stays dense" in one for one in notes), notes
    assert worst(gm, model) < CLOSE


def test_a_router_is_no_indexer() -> None:
    gm = captured(lambda q, k: (q @ k.transpose(2, 3)[..., :4]).topk(2)[0], *(torch.randn(1, 2, 9, 4),) * 2)
    assert LowerIndexer().run(gm.graph, CTX).notes == ("the graph has no sparse indexer",)
    assert LowerSparseAttention().run(gm.graph, CTX).notes == ("nothing in the graph selects keys",)


# Sabotage: each must be seen


def _one_late(gm: fx.GraphModule) -> None:
    node = only(gm, select_keys_op)
    where: Any = node.args[3]
    with gm.graph.inserting_before(node):
        late = gm.graph.call_function(torch.ops.aten.clamp_min.default, (gm.graph.call_function(
            torch.ops.aten.sub.Tensor, (where, 1)), 0))  # fmt: skip
    node.replace_input_with(where, late)


def _scale(gm: fx.GraphModule) -> None:
    replaced(only(gm, sparse_attend_op), scale=programs.SCALE * 1.1)


def _fewer(gm: fx.GraphModule) -> None:
    node = only(gm, select_keys_op)
    node.args = (*node.args[:4], TOPK - 1, *node.args[5:])


def _others(gm: fx.GraphModule) -> None:
    """The indices of another layer: those of keys in reverse."""
    node = only(gm, select_keys_op)
    k: Any = node.args[1]
    with gm.graph.inserting_before(node):
        node.replace_input_with(k, gm.graph.call_function(torch.ops.aten.flip.default, (k, [1])))


@pytest.mark.parametrize("sabotage", [_one_late, _scale, _fewer, _others])
def test_a_wrong_rewrite_is_seen(sabotage: Callable[[fx.GraphModule], None]) -> None:
    gm, _, _ = lowered(Model())
    sabotage(gm)
    gm.recompile()
    assert worst(gm, Model()) > 1e-2
