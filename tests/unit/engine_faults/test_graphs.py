# SPDX-License-Identifier: Apache-2.0
"""Graphs: no node keeps the value it had before a pass, and every option that changes a program changes its name."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from pcp_passes.engine.executor import Executor  # noqa: F401  # the step package before its passes
from pcp_passes.ir import meta
from pcp_passes.passes.base import PassContext, PassResult
from pcp_passes.passes.pipeline import Event
from pcp_passes.step.values import compute_value
from tests import steps as small


class Fresh:
    """After every pass, each node's value is what its operands give."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.stale: list[str] = []

    def observe(self, event: Event) -> None:
        self.checked.append(event.name)
        root = event.graph.owning_module
        for node in event.graph.nodes:
            if node.op not in ("placeholder", "output") and shapes(compute_value(node, root)) != shapes(
                meta.value(node)
            ):
                self.stale.append(f"{event.name}: {node.name}")


def shapes(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [shapes(one) for one in value]
    return (str(list(value.shape)), value.dtype) if hasattr(value, "shape") else type(value)


OPTIONS = ({}, {"topk": True, "share_topk": "owner"}, {"verify_tokens": "broadcast"}, {"optimize": False},
           {"keep_draft_logits": False}, {"steps": 2}, {"steps": 0})  # fmt: skip


@pytest.mark.parametrize("given", OPTIONS, ids=str)
def test_no_value_is_stale_after_any_pass(given: dict[str, Any]) -> None:
    fresh = Fresh()
    small.program(2, observers=[fresh], **given)
    assert "place-step" in fresh.checked and not fresh.stale


def test_a_value_from_before_a_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a body call that became sharded keeps the row count of all tokens."""
    from pcp_passes.passes.steps import place_step as module

    original = module.place_step

    def stale(graph: fx.Graph, ctx: PassContext) -> PassResult:
        whole = next(meta.value(node) for node in graph.nodes if node.target == "target.replicated")
        result = original(graph, ctx)
        call = next(node for node in graph.nodes if node.target == "target.sharded")
        meta.set_aten_value(call, whole)
        return result

    monkeypatch.setattr(module, "place_step", stale)
    fresh = Fresh()
    small.program(2, observers=[fresh])
    assert "place-step: target" in fresh.stale


def test_every_option_changes_what_a_cache_or_another_rank_compares() -> None:
    programs = [small.program(2, **given) for given in OPTIONS]
    assert len({program.fingerprint for program in programs}) == len(OPTIONS)
    assert small.program(2).fingerprint == programs[0].fingerprint != small.program(4).fingerprint
