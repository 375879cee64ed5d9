# SPDX-License-Identifier: Apache-2.0
"""Every part of a split that makes it right, broken in turn: the invariant or the numbers must show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.errors import InvariantError
from pcp_passes.ir import invariants
from pcp_passes.passes import PassContext
from pcp_passes.piecewise import cuts, stretches
from pcp_passes.piecewise.invariants import PIECEWISE
from pcp_passes.piecewise.pieces import entered, is_hold, piece_at, pieces_of
from pcp_passes.piecewise.split import split_body
from tests.unit.piecewise.splits import (
    CopyingRunner,
    alive_together,
    between,
    body,
    changed,
    odd,
    run,
    several_results,
)

pytestmark = pytest.mark.unit
CTX = PassContext(2)


def _splitting_op(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    right = cuts.reason_to_cut
    monkeypatch.setattr(stretches, "reason_to_cut", lambda node, c: None if "attend" in node.name else right(node, c))
    return split_body(body(between), CTX)


def _odd_border(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    monkeypatch.setattr(stretches, "odd_value", lambda node, symbol: None)
    return split_body(body(odd), CTX)


def _holds(gm: fx.GraphModule, slot: str) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if is_hold(node) and node.args[1] == slot]


def _without_hold(slot: str) -> Callable[[pytest.MonkeyPatch], fx.GraphModule]:
    def change(gm: fx.GraphModule) -> None:
        (node,) = _holds(gm, slot)
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)

    return lambda monkeypatch: changed(split_body(body(between), CTX), change)


def _part_left_outside(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    split = split_body(body(several_results), CTX)
    piece = pieces_of(split)[0]
    end = piece.gm.graph.output_node()
    call = end.args[0][0].args[0]
    end.args = ((call,),)
    piece.gm.recompile()
    return split


def _shares_memory(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    split = split_body(body(between), CTX)
    piece = pieces_of(split)[0]
    end = piece.gm.graph.output_node()
    end.args = ((end.args[0][0].all_input_nodes[0].all_input_nodes[0],),)
    return split


def _one_slot(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    def change(gm: fx.GraphModule) -> None:
        for node in _holds(gm, "held.1"):
            node.update_arg(1, "held.0")

    return changed(split_body(body(alive_together), CTX), change)


def _other_type(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    def change(gm: fx.GraphModule) -> None:
        _holds(gm, "result")[0].update_arg(1, "held.0")

    return changed(split_body(body(between), CTX), change)


def _other_kind(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    def change(gm: fx.GraphModule) -> None:
        call = next(node for node in gm.graph.nodes if piece_at(gm.graph, node) is not None)
        call.args = (call.args[0], call.args[0])

    return changed(split_body(body(between), CTX), change)


def _eager_for_no_reason(monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    right = cuts.reason_to_cut
    monkeypatch.setattr(stretches, "reason_to_cut", lambda node, c: "just so" if node.name == "sin" else right(node, c))
    return split_body(body(between), CTX)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (_splitting_op, "%kv_attend in the piece: attends over the cache"),
        (_odd_border, "has a size of 8*sM"),
        (_without_hold("held.0"), "is no parameter, no result of a piece and not held"),
        (_without_hold("hidden"), "read by %piece_0 without a hold"),
        (_without_hold("result"), "result %matmul_1 is not held"),
        (_part_left_outside, "result 0 of the piece is no tensor"),
        (_shares_memory, "result 0 of the piece shares memory"),
        (_one_slot, "writes slot held.0 before the last call that reads"),
        (_other_type, "slot held.0 holds another type"),
        (_other_kind, "is held; the piece was made for one that is parameter"),
        (_eager_for_no_reason, "outside of every piece for no reason"),
    ],
)
def test_a_broken_split_is_seen(broken: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    split = broken(monkeypatch)
    monkeypatch.undo()
    with pytest.raises(InvariantError, match="PIECEWISE") as caught:
        invariants.check([PIECEWISE], split.graph, CTX)
    assert said in str(caught.value), str(caught.value)


def test_a_slot_of_two_values_gives_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = split_body(body(alive_together), CTX), _one_slot(monkeypatch)
    wanted = run(body(alive_together))
    with entered(CopyingRunner()):
        assert torch.equal(run(right), wanted) and not torch.equal(run(wrong), wanted)


def test_a_gather_left_in_a_piece_is_seen() -> None:
    split = split_body(body(between, "sharded"), CTX, "inside")
    for piece in pieces_of(split):
        piece.collectives = "outside"
    with pytest.raises(InvariantError, match="no captured piece waits for other ranks"):
        invariants.check([PIECEWISE], split.graph, CTX)
