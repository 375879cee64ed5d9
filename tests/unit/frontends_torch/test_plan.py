# SPDX-License-Identifier: Apache-2.0
"""The plan of one call: every token once, padding that repeats a real token, at least two rows."""

from __future__ import annotations

import pytest
import torch

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.torch.plan import PlanCache, TokenPlan, build_plan


def require_identities(plan: TokenPlan, count: int, pcp: int) -> None:
    rank_major = plan.rows.flatten()
    assert torch.equal(rank_major[plan.restore], torch.arange(count)), "restore gives global order"
    assert plan.rows.shape == (pcp, plan.num_rows) and plan.num_tokens == count and plan.num_rows >= 2
    assert sum(plan.real) == count
    for rank, real in enumerate(plan.real):
        assert (plan.rows[rank, real:] == 0).all(), "a padded row is token 0"
        assert len(set(plan.rows[rank, :real].tolist())) == real
    places = [(int(p) // plan.num_rows, int(p) % plan.num_rows) for p in plan.restore]
    assert all(row < plan.real[rank] for rank, row in places), "no padded row is restored"


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("pcp", [1, 2, 3, 4, 8])
def test_identities(layout: str, pcp: int) -> None:
    for count in range(2, 70):
        require_identities(build_plan(count, pcp, layout), count, pcp)


def test_the_check_sees_a_wrong_plan() -> None:
    plan = build_plan(12, 2, "zigzag")
    swapped = TokenPlan(plan.rows.flip(0), plan.restore, plan.real)
    with pytest.raises(AssertionError, match="restore gives global order"):
        require_identities(swapped, 12, 2)


def test_worked_example() -> None:
    plan = build_plan(6, 2, "zigzag")
    assert plan.rows.tolist() == [[0, 1, 5], [2, 3, 4]]
    assert plan.restore.tolist() == [0, 1, 3, 4, 5, 2]


def test_ranks_without_tokens_repeat_token_0() -> None:
    plan = build_plan(3, 4, "contiguous")
    assert plan.num_rows == 2 and min(plan.real) == 0


def test_plans_are_kept_and_the_oldest_is_forgotten() -> None:
    cache, device = PlanCache(2, "zigzag", size=2), torch.device("cpu")
    first = cache.get(10, device)
    assert cache.get(10, device) is first
    cache.get(11, device)
    assert cache.get(10, device) is first, "used last, so 11 goes first"
    cache.get(12, device)
    assert cache.get(10, device) is first
    cache.get(13, device), cache.get(14, device)
    assert cache.get(10, device) is not first


def test_an_unknown_layout() -> None:
    with pytest.raises(ConfigError, match="layout is one of"):
        build_plan(12, 2, "striped")
