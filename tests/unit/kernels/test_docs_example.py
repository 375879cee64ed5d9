# SPDX-License-Identifier: Apache-2.0
"""The chain of operators in ``docs/kernels.md``, run as it is written and held against attention over all keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import pcp_kernels

pytestmark = pytest.mark.unit

(EXAMPLE,) = re.findall(
    r"^```python\n(.*?)^```", (Path(__file__).parents[3] / "docs" / "kernels.md").read_text(), re.DOTALL | re.MULTILINE
)


def run(old: str = "", new: str = "") -> dict[str, Any]:
    """The names that the example leaves, with a piece of it replaced."""
    assert old in EXAMPLE
    torch.manual_seed(0)
    held: dict[str, Any] = {}
    exec(compile(EXAMPLE.replace(old, new) if old else EXAMPLE, "docs/kernels.md", "exec"), held)
    return held


def faults(held: dict[str, Any]) -> list[str]:
    """What is wrong with what the example computed."""
    indices, count, out, total = held["indices"], held["count"], held["out"], held["T"]
    sizes = torch.arange(1, total + 1).clamp(max=16)
    found = []
    if count.tolist() != sizes.tolist():
        found.append("count")
    if bool((indices > torch.arange(total)[:, None]).any()):
        found.append("keys after the row")
    keys = torch.cat([held["latent"], held["rope_key"]], dim=1)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for row, picked in enumerate(indices):
        seen[row, picked[picked >= 0].long()] = True
    scores = torch.einsum("thd,sd->ths", held["query"], keys) * 576**-0.5
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if not torch.allclose(out, scores.softmax(-1) @ held["latent"], atol=1e-4, rtol=1e-4):
        found.append("attention")
    if not torch.allclose(held["lse"], scores.logsumexp(-1), atol=1e-4):
        found.append("lse")
    return found


def test_the_chain_attends_to_the_keys_it_selects() -> None:
    held = run()
    assert faults(held) == []
    assert held["record"].shape == (200, 132) and held["out"].shape == (200, 16, 512)


def test_it_selects_what_scores_best() -> None:
    """Against keys and queries that were never rounded to fp8: nearly all of the selection is theirs."""
    held = run()
    even, odd = held["cos"][:, None], held["sin"][:, None]

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x[..., :64:2], x[..., 1:64:2]
        pairs = torch.stack([first * even - second * odd, first * odd + second * even], dim=-1)
        return torch.cat([pairs.flatten(-2), x[..., 64:]], dim=-1)

    key = turned(torch.nn.functional.layer_norm(held["k"], (128,), eps=1e-6)[:, None])[:, 0]
    scores = torch.einsum("th,ths->ts", held["w"], torch.relu(turned(held["q"]) @ key.t()))
    for row in (50, 120, 199):
        best = set(scores[row, : row + 1].topk(16).indices.tolist())
        assert len(best & set(held["indices"][row].tolist())) >= 12


@pytest.mark.parametrize(
    "old, new, wrong",
    [
        ("(position + 1)", "(position + 2)", "keys after the row"),
        ("indices, table, request, PAGE)", "indices, table.flip(1), request, PAGE)", "attention"),
        ("torch.cat([latent, rope_key], dim=1), slots)", "torch.cat([latent, rope_key], dim=1), slots ^ 1)", "lse"),
        ("ke, TOPK, PAGE)", "ke // 2, TOPK, PAGE)", "count"),
    ],
)
def test_a_chain_with_a_wrong_link_is_seen(old: str, new: str, wrong: str) -> None:
    assert wrong in faults(run(old, new))


def test_it_shows_the_whole_chain() -> None:
    chain = ("index_pack", "index_scatter", "index_prep", "index_topk_paged", "index_remap", "sparse_mla")
    calls = [EXAMPLE.index(f"{name}(") for name in chain]
    assert calls == sorted(calls)
    assert set(chain) <= set(pcp_kernels.__all__)
