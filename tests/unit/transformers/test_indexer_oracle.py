# SPDX-License-Identifier: Apache-2.0
"""Pack, prepare, select: the same keys as the indexers of transformers, and as DeepSeek's FP8 formula.

transformers scores in fp32 and has neither Hadamard nor FP8, so that chain is compared in fp32. The FP8 chain is
compared with DeepSeek-V3.2's formula, written out here with logarithms and a Hadamard matrix, on the same projections.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pcp_kernels.reference import pack, prep, score, select
from tests.comparator import compare_selected
from tests.unit.transformers import indexers
from tests.unit.transformers.indexers import DIM, HEADS, LENGTH, ROPE, ROPE_DIM, TOPK, Seen

pytest.importorskip("transformers")

SCALE = DIM**-0.5 * HEADS**-0.5
KE = torch.arange(1, LENGTH + 1, dtype=torch.int32)
MODELS = sorted(ROPE)
EPSILON = 2e-5
"""Scores reach 12; ours and transformers' differ by 2.4e-6 at most, in the order of their sums."""


def chain(seen: Seen, rope: str, *, store: str = "fp32", hadamard: bool = False, **changed: Any) -> dict[str, Any]:
    """Keys, prepared queries, scores f32[S, S] and selection i32[S, topk] of one layer; ``changed`` breaks it."""
    weight, bias, eps = changed.get("norm", (seen.norm_weight, seen.norm_bias, seen.norm_eps))
    cos, sin = changed.get("angles", (seen.cos, seen.sin))
    q, k, ke = changed.get("q", seen.q), changed.get("k", seen.k), changed.get("ke", KE)
    record = pack.index_pack(k, weight, bias, eps, cos, sin, rope=rope, hadamard=hadamard, rounding="bf16", store=store)
    keys, scale = pack.index_unpack(record, DIM)
    q, w = prep.index_prep(
        q, seen.weights, cos, sin, rope=rope, hadamard=hadamard, store=store, factor=changed.get("factor", SCALE),
        rounding="bf16" if store == "fp8" else "fp32",
    )  # fmt: skip
    indices = select.topk_rows(q, w, keys, scale, torch.zeros_like(KE), ke, TOPK)
    return {"keys": keys, "scale": scale, "q": q, "w": w, "scores": score.score(q, w, keys, scale), "indices": indices}


def ordered(selected: list[set[int]]) -> torch.Tensor:
    """Sets of keys as i32[S, topk]: ascending, -1 behind them."""
    return torch.tensor([sorted(row) + [-1] * (TOPK - len(row)) for row in selected], dtype=torch.int32)


def compare(found: torch.Tensor, seen: Seen, epsilon: float = EPSILON) -> None:
    compare_selected(found, ordered(seen.selected), scores=seen.scores, n_valid=KE, topk=TOPK, epsilon=epsilon)


@pytest.mark.parametrize("model", MODELS)
def test_the_indexers_run_where_the_configuration_says(model: str) -> None:
    layers = [seen.layer for seen in indexers.watch(model)]
    assert layers == ([0, 2] if model == "glm_moe_dsa" else [0, 1, 2])
    assert max(len(row) for row in indexers.watch(model)[0].selected) == TOPK < LENGTH // 8


@pytest.mark.parametrize("model", MODELS)
def test_scores_are_those_of_transformers(model: str) -> None:
    """Scores, since a common positive factor that is missing changes no selection."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    for seen in indexers.watch(model):
        difference = (chain(seen, ROPE[model])["scores"] - seen.scores)[visible].abs().max()
        assert difference < EPSILON, (seen.layer, difference)
        unscaled = chain(seen, ROPE[model], factor=DIM**-0.5)["scores"]
        assert (unscaled - seen.scores)[visible].abs().max() > 1


@pytest.mark.parametrize("model", MODELS)
def test_selects_the_keys_that_transformers_selects(model: str) -> None:
    for seen in indexers.watch(model):
        compare(chain(seen, ROPE[model])["indices"], seen)


@pytest.mark.parametrize("model", MODELS)
def test_rows_that_differ_are_ties(model: str) -> None:
    """With epsilon 0 on our own scores, what transformers chose in place of ours has the very score of the last key."""
    for seen in indexers.watch(model):
        found = chain(seen, ROPE[model])
        rows = [set(row) - {-1} for row in found["indices"].tolist()]
        differing = [i for i in range(LENGTH) if rows[i] != seen.selected[i]]
        assert len(differing) < LENGTH // 4, "most rows have a clear last key"
        for i in differing:
            at_edge = found["scores"][i, sorted(rows[i] ^ seen.selected[i])]
            assert at_edge.max() - at_edge.min() <= EPSILON


def normed(seen: Seen) -> torch.Tensor:
    return torch.nn.functional.layer_norm(seen.k, (DIM,), seen.norm_weight, seen.norm_bias, seen.norm_eps)


OTHER = {"half": "interleaved", "interleaved": "half"}
# Rotating the last dimensions is rotating the first ones of swapped dimensions: scores do not see the swap itself.
SWAPPED = torch.cat([torch.arange(DIM - ROPE_DIM, DIM), torch.arange(DIM - ROPE_DIM)])
SABOTAGE: dict[str, Callable[[Seen], dict[str, Any]]] = {
    "the pairs of the other RoPE": lambda seen: {"other": True},
    "RoPE on the last dimensions": lambda seen: {
        "norm": (None, None, 0), "k": normed(seen)[:, SWAPPED], "q": seen.q[..., SWAPPED],
    },
    "LayerNorm without its bias": lambda seen: {"norm": (seen.norm_weight, torch.zeros(DIM), seen.norm_eps)},
    "ke is the position": lambda seen: {"ke": KE - 1},
    "angles of the next pair": lambda seen: {"angles": (seen.cos.roll(1, 1), seen.sin.roll(1, 1))},
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_wrong_chain_is_seen(name: str, model: str) -> None:
    for seen in indexers.watch(model):
        changed = SABOTAGE[name](seen)
        rope = OTHER[ROPE[model]] if changed.pop("other", False) else ROPE[model]
        with pytest.raises(AssertionError):
            compare(chain(seen, rope, **changed)["indices"], seen)


def test_the_swapped_dimensions_alone_are_not_seen() -> None:
    """Control of the sabotage above: without rotation, swapped dimensions score the same."""
    seen = indexers.watch("glm_moe_dsa")[0]
    still = (torch.ones_like(seen.cos), torch.zeros_like(seen.sin))
    plain = {"norm": (None, None, 0), "k": normed(seen), "angles": still}
    swapped = plain | {"k": plain["k"][:, SWAPPED], "q": seen.q[..., SWAPPED]}
    found, wanted = (chain(seen, "half", **given)["scores"] for given in (swapped, plain))
    assert (found - wanted).abs().max() < EPSILON


MAX_CODES = 0.0005
"""Share of FP8 codes that may differ, where two sums are on different sides of a rounding: none does here; without the
Hadamard transform more than half do."""
FP8_EPSILON = 1e-3
"""Scores reach 40 and differ by 2e-6, in the order of their sums."""


class Formula:
    """DeepSeek-V3.2's indexer in FP8, on one layer's projections: matrix, logarithm, division."""

    def __init__(self, seen: Seen) -> None:
        signs = [[(-1.0) ** (i & j).bit_count() for j in range(DIM)] for i in range(DIM)]
        self.hadamard = torch.tensor(signs, dtype=torch.float64) * DIM**-0.5
        self.k, self.k_scale = self.quantised(uneven(seen)[:, None], seen)
        self.q, self.q_scale = self.quantised(seen.q, seen)
        weights = seen.weights.double() * SCALE * self.q_scale
        products = torch.einsum("ihd,jd->ihj", self.q, self.k[:, 0]).relu()
        scores = torch.einsum("ih,ihj->ij", weights, products) * self.k_scale[:, 0]
        self.scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)

    def quantised(self, x: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
        """``[S, n, D]`` rotated (half-split), transformed, rounded to bf16, to FP8; and scales ``[S, n]``."""
        rotated, plain = x.double().split([ROPE_DIM, DIM - ROPE_DIM], -1)
        first, second = rotated.chunk(2, -1)
        cos, sin = seen.cos.double()[:, None], seen.sin.double()[:, None]
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        transformed = (torch.cat([rotated, plain], -1) @ self.hadamard).bfloat16().double()
        scale = torch.exp2(torch.ceil(torch.log2(transformed.abs().amax(-1).clamp(min=1e-4) / 448)))
        values = (transformed / scale[..., None]).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        return values.double(), scale

    @property
    def selected(self) -> torch.Tensor:
        order = torch.argsort(self.scores, dim=1, descending=True, stable=True)
        return ordered([set(row[: min(TOPK, i + 1)]) for i, row in enumerate(order.tolist())])

    def compare(self, found: torch.Tensor) -> None:
        compare_selected(found, self.selected, scores=self.scores, n_valid=KE, topk=TOPK, epsilon=FP8_EPSILON)


def uneven(seen: Seen) -> torch.Tensor:
    """Normalised keys, times 0.2 to 4: LayerNorm alone would give nearly all of them one scale."""
    return normed(seen) * torch.linspace(0.2, 4, LENGTH).roll(LENGTH // 3)[:, None]


def fp8_chain(seen: Seen, *, hadamard: bool = True) -> dict[str, Any]:
    return chain(seen, "half", store="fp8", hadamard=hadamard, norm=(None, None, 0), k=uneven(seen))


def test_fp8_codes_and_scales_are_those_of_the_formula() -> None:
    for seen in indexers.watch("deepseek_v32"):
        found, wanted = fp8_chain(seen), Formula(seen)
        for codes, required in ((found["keys"], wanted.k[:, 0]), (found["q"], wanted.q)):
            assert (codes.double() != required).double().mean() <= MAX_CODES
        assert torch.equal(found["scale"].double(), wanted.k_scale[:, 0])
        assert len(found["scale"].unique()) > 3
        without = fp8_chain(seen, hadamard=False)["keys"]
        assert (without.double() != wanted.k[:, 0]).double().mean() > 0.5, "the Hadamard transform is seen"


def test_fp8_selects_what_the_formula_selects() -> None:
    for seen in indexers.watch("deepseek_v32"):
        Formula(seen).compare(fp8_chain(seen)["indices"])


def test_fp8_without_scales_is_seen() -> None:
    for seen in indexers.watch("deepseek_v32"):
        found = fp8_chain(seen)
        unscaled = select.topk_rows(found["q"], found["w"], found["keys"], None, torch.zeros_like(KE), KE, TOPK)
        with pytest.raises(AssertionError):
            Formula(seen).compare(unscaled)
