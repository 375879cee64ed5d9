# SPDX-License-Identifier: Apache-2.0
"""lower-sparse-index: before and expected, the two forms of a mask, and every form that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes import paged
from pcp_passes.engine.bodies import trace
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import PassContext, build_variants
from pcp_passes.passes.bodies.lower_sparse_index import lower_sparse_index

ROWS, HEADS, SIZE, TOPK = 12, 3, 8, 4
Form = Callable[[torch.Tensor], torch.Tensor]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _masked(scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~torch.ones(1, 1, 1, dtype=torch.bool), float("-inf"))


class Scored(nn.Module):
    """DeepSeek's indexer on a batch of one, with a place to change each step."""

    def __init__(self, mask: Form = _masked, relu: Form = torch.relu, scale: Form = lambda x: x * 0.25) -> None:
        super().__init__()
        self.mask, self.relu, self.scale = mask, relu, scale

    def forward(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dep = paged.index_write(k, "target.0")
        keys = paged.index_keys(k[None], dep)
        scores = self.relu(self.scale(torch.matmul(q[None], keys.transpose(-1, -2).unsqueeze(1))))
        summed = torch.matmul(weights[None].unsqueeze(-2), scores).squeeze(-2)
        return self.select(self.mask(summed))

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(TOPK, dim=-1).indices.to(torch.int32)


class Expected(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        dep = paged.index_write(k, "target.0")
        queries, batched = q[None], weights[None]
        return paged.index_topk(queries[0], batched[0] * 0.25, dep, "target.0", TOPK).unsqueeze(0)


def inputs() -> tuple[torch.Tensor, ...]:
    return torch.randn(ROWS, HEADS, SIZE), torch.randn(ROWS, SIZE), torch.randn(ROWS, HEADS)


def lowered(module: nn.Module) -> fx.GraphModule:
    gm = trace(module, inputs())
    result = lower_sparse_index(gm.graph)
    assert result.rewrites == 1
    gm.recompile()
    return gm


def text(gm: fx.GraphModule) -> str:
    return print_graph(gm, numbered=True, placements=False, comments=False)


@pytest.mark.parametrize("mask", [_masked, lambda x: x + torch.zeros(1, 1, 1)], ids=["bool", "additive"])
def test_before_and_expected(mask: Form) -> None:
    gm = lowered(Scored(mask))
    assert text(gm) == text(trace(Expected(), inputs()))
    for node in gm.graph.nodes:
        assert all(sum(map(fakes.has_token_symbol, t.shape)) <= 1 for t in meta.tensors(node))


def test_it_computes_the_selection() -> None:
    """Against the formula on one request, the scale and the mask by position included."""
    q, k, weights = (x.double() for x in inputs())
    gm = trace(Scored(), (q, k, weights))
    lower_sparse_index(gm.graph)
    gm.recompile()
    positions = torch.arange(ROWS)
    held = paged.AttentionInputs(
        positions, "replicated", torch.arange(3, dtype=torch.int32)[None], torch.tensor([0, ROWS]),
        torch.tensor([ROWS]), positions,
    )  # fmt: skip
    with paged.running(paged.PagedCaches(3, 4, torch.float64), held):
        found = gm(q, k, weights)[0]
    scores = (torch.relu(torch.einsum("nhd,jd->nhj", q, k) * 0.25) * weights[..., None]).sum(1)
    for row in range(ROWS):
        order = sorted(range(row + 1), key=lambda j: (-float(scores[row, j]), j))[:TOPK]
        assert found[row].tolist() == sorted(order) + [-1] * (TOPK - len(order))


class _Wide(Scored):
    def select(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(TOPK, dim=-1).indices


def test_int64_indices_stay_int64() -> None:
    gm = lowered(_Wide())
    output = meta.tensor(gm.graph.output_node().args[0])
    assert output is not None and output.dtype == torch.int64


class _Values(Scored):
    def select(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(TOPK, dim=-1).values


class _Least(Scored):
    def select(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(TOPK, dim=-1, largest=False).indices


class _Twice(Scored):
    def select(self, scores: torch.Tensor) -> torch.Tensor:
        best = scores.topk(TOPK, dim=-1)
        return best.indices + best.values.to(torch.int64)


class _Kept(Scored):
    """The scores are read by something else too, so the keys would still be needed."""

    def select(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.topk(TOPK, dim=-1).indices + scores.isnan().sum()


def _causal(scores: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(scores.shape[-1])
    return scores.masked_fill(rows[None, :] > rows[:, None], float("-inf"))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Scored(mask=_same), "without a mask a row would see later keys"),
        (Scored(mask=_causal), "a mask with sizes of the sequence"),
        (Scored(mask=lambda x: x * torch.ones(1, 1, 1)), "scaled by a positive constant"),
        (Scored(mask=lambda x: x.masked_fill(torch.zeros(1, 1, 1, dtype=torch.bool), 0.0)), "which a score may be"),
        (Scored(mask=lambda x: _masked(x.int().float())), "is not read"),
        (Scored(relu=torch.sigmoid), "go through relu"),
        (Scored(scale=lambda x: x * -0.25), "positive constant"),
        (Scored(scale=lambda x: x * torch.ones(1)), "positive constant"),
        (_Values(), "only the indices"),
        (_Least(), "topk along the keys"),
        (_Twice(), "only the indices"),
        (_Kept(), "one consumer"),
    ],
)
def test_another_form_is_refused(module: nn.Module, reason: str) -> None:
    gm = trace(module, inputs())
    with pytest.raises(Refusal, match=reason):
        lower_sparse_index(gm.graph)


def test_a_body_is_refused_before_the_pass() -> None:
    with pytest.raises(Refusal, match="lower-sparse-index has to replace it first"):
        build_variants(trace(Scored(), inputs()), PassContext(2))


def test_what_stands_for_keys_cannot_run() -> None:
    with pytest.raises(ConfigError, match="cannot run"):
        paged.index_keys(torch.zeros(1, 2, 3), torch.zeros(0))


def test_nothing_to_do_says_so() -> None:
    class Plain(nn.Module):
        def forward(self, q: torch.Tensor) -> Any:
            return q * 2

    gm = trace(Plain(), (torch.zeros(4, 3),))
    result = lower_sparse_index(gm.graph)
    assert result.rewrites == 0 and result.notes == ("the model has no sparse indexer",)
