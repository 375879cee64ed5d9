# SPDX-License-Identifier: Apache-2.0
"""lower-indexer and lower-sparse-attention: masks that look as if they marked the selected keys alone, and do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests import sparse_programs as programs
from tests.sparse_programs import INF, Model, Tensor
from tests.unit.passes.test_lower_indexer import CLOSE, lowered, worst

pytestmark = pytest.mark.unit


def _seen(change: Callable[[Tensor, Tensor], Tensor]) -> programs.Attend:
    """Attention under what ``change(selected, causal)`` makes of both."""

    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
        selected = torch.zeros(1, *causal.shape, dtype=torch.bool).scatter(-1, indices.long(), True)
        return F.scaled_dot_product_attention(q, k, v, change(selected, causal)[:, None], scale=programs.SCALE)

    return attend


def _marked(like: Callable[[Tensor], Tensor], value: float | bool, cut: int = 0, **options: str) -> programs.Attend:
    """Attention under a mask that is no whole row of each head, or that the scatter does more to."""

    def attend(q: Tensor, k: Tensor, v: Tensor, indices: Tensor, causal: Tensor) -> Tensor:
        mask = like(causal).scatter(-1, indices.long(), value, **options)[..., cut:, cut:]
        mask = mask & causal if mask.dtype == torch.bool else mask + torch.full(causal.shape, INF).triu(1)
        return F.scaled_dot_product_attention(q, k, v, mask[None], scale=programs.SCALE)

    return attend


def _larger(causal: Tensor) -> Tensor:
    return torch.zeros(1, causal.shape[0] + 1, causal.shape[0] + 1, dtype=torch.bool)


def _of_heads(causal: Tensor) -> Tensor:
    return torch.zeros(programs.HEADS, *causal.shape, dtype=torch.bool)


UNFOLLOWED: dict[str, tuple[programs.Attend, str]] = {
    "either way round": (_seen(lambda s, c: (s | s.transpose(1, 2)) & c), "have to be hidden"),
    "along the diagonal": (_seen(lambda s, c: s.flip(1, 2).transpose(1, 2) & c), "have to be hidden"),
    "later rows and keys": (_marked(_larger, True, 1), "marks keys in"),
    "one head alone": (_marked(_of_heads, True), "marks keys in"),
    "added to what hides": (
        _marked(lambda c: torch.full((1, *c.shape), -2e9), 0.0, reduce="add"), "reduces what it marks",
    ),
    "the mask itself": (
        lambda q, k, v, indices, causal: torch.zeros(1, *causal.shape).scatter(-1, indices.long(), 1.0),
        "have to be hidden",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFOLLOWED)
def test_marks_of_other_rows_or_keys_keep_the_indexer_dense(name: str) -> None:
    attend, reason = UNFOLLOWED[name]
    gm, notes, counts = lowered(Model(attend=attend))
    assert counts == (0, 0) and reason in notes[0], notes
    assert worst(gm, Model(attend=attend)) == 0


@pytest.mark.parametrize("reach", [1, 3, 6])
def test_keys_that_are_always_seen_keep_the_attention_dense(reach: int) -> None:
    """A window beside the selection, also of the very size that the proof asks about."""

    def change(selected: Tensor, causal: Tensor) -> Tensor:
        places = torch.arange(causal.shape[-1])
        return (selected | (places[:, None] - places[None, :] < reach)) & causal

    model = Model(attend=_seen(change))
    gm, notes, counts = lowered(model)
    assert counts == (1, 0) and any("attention stays dense" in one for one in notes), notes
    assert worst(gm, model) < CLOSE


def test_a_selection_for_one_batch_is_not_shared_by_others() -> None:
    """The rows of the second batch have the mask of the first, broadcast."""

    def model(q: Tensor, *rest: Tensor) -> Tensor:
        return Model(expand=_twice, attend=programs.shown, scores=programs.einsums)(torch.cat([q, q.flip(1)]), *rest)

    gm, notes, counts = lowered(model)
    assert counts == (1, 0) and "its batch is not that of the selection" in notes[-1], notes
    assert worst(gm, model) < CLOSE


def _twice(latent: Tensor, rope: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    k, v = programs.joined(latent, rope, weight)
    return torch.cat([k, k]), torch.cat([v, v])
