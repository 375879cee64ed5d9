# SPDX-License-Identifier: Apache-2.0
"""Full graphs of experts whose weights a graph would copy turn by turn are refused when an engine is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.options import EngineOptions
from pcp_passes.engine.requirements import require_full_graphs
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import ConfigError
from pcp_passes.paged import experts
from pcp_passes.passes import PassContext
from pcp_passes.sparse import backends
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step import StepProgram

pytestmark = pytest.mark.unit

CUDA = torch.device("cuda")
HIDDEN, INNER, EXPERTS, WIDTH = 16, 24, 5, 2
PAIR = (2 * INNER * HIDDEN + HIDDEN * INNER) * 2
"""Bytes of one expert's weights in two-byte floats."""


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, HIDDEN)
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        weights, chosen = x[:, :EXPERTS].topk(WIDTH)
        moved: torch.Tensor = experts.experts_op(x, chosen, weights, self.gate_up, self.down, "silu")
        return x + moved


def program(dtype: torch.dtype = torch.float16) -> StepProgram:
    module = Mixture().to(dtype).eval().requires_grad_(False)
    ids = torch.arange(8)
    captured = {"": prepare(module, (ids, ids))}
    target = Model(
        "target", make_bodies(captured, PassContext(1)), nn.Linear(HIDDEN, 8, dtype=dtype), 8, HIDDEN, (), dtype,
        captured=captured,
    )  # fmt: skip
    return StepProgram(target, NoDrafter(), pcp=1)


def graphs(dtype: torch.dtype = torch.float16) -> list[fx.Graph]:
    return [body.graph for body in program(dtype).target.bodies.values()]


def options(mode: str = "full_and_piecewise", **given: Any) -> EngineOptions:
    return EngineOptions(graph_mode=mode, max_requests=32, budget=512, **given)


@pytest.fixture(autouse=True)
def three_pairs_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """So at most 192 pairs, or 96 rows, are unrolled."""
    monkeypatch.setattr(experts, "GATHERED_BYTES", 3 * PAIR)
    monkeypatch.setattr(backends, "capability", lambda: (12, 0))


@pytest.mark.parametrize("mode", ["full_decode_only", "full_and_piecewise"])
def test_too_many_turns_are_refused(mode: str) -> None:
    """32 requests of four rows are 128 rows: 256 pairs, 86 turns."""
    with pytest.raises(ConfigError) as caught:
        require_full_graphs(graphs(), options(mode), 3, CUDA)
    said = str(caught.value)
    for text in (f"graph_mode={mode!r}", "128 rows", "2 experts", "86 turns", "at most 64", "float16",
                 "graph_mode='piecewise'", "graph_requests of at most 24"):  # fmt: skip
        assert text in said, said


def test_what_fits_passes() -> None:
    held = graphs()
    require_full_graphs(held, options(), 2, CUDA)  # 96 rows
    require_full_graphs(held, options(graph_requests=(8, 24)), 3, CUDA)
    with pytest.raises(ConfigError):
        require_full_graphs(held, options(graph_requests=(8, 25)), 3, CUDA)


def test_pieces_and_cpus_need_no_bound() -> None:
    """Between pieces the op reads loads; on a CPU nothing is unrolled."""
    held = graphs()
    for mode in ("none", "piecewise"):
        require_full_graphs(held, options(mode), 3, CUDA)
    require_full_graphs(held, options(), 3, torch.device("cpu"))


@pytest.mark.parametrize(
    ("card", "dtype", "refused"),
    [((9, 0), torch.bfloat16, False), ((10, 0), torch.bfloat16, False), ((12, 0), torch.bfloat16, True),
     ((9, 0), torch.float16, True), (None, torch.bfloat16, False), (None, torch.float16, True)],
)  # fmt: skip
def test_a_card_with_the_grouped_product_needs_no_bound(
    card: Any, dtype: torch.dtype, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a card, as when a configuration for another machine is checked, only what every card lacks is refused."""
    monkeypatch.setattr(backends, "capability", lambda: card)
    if not refused:
        require_full_graphs(graphs(dtype), options(), 3, CUDA)
        return
    with pytest.raises(ConfigError, match="86 turns"):
        require_full_graphs(graphs(dtype), options(), 3, CUDA)


def test_an_engine_asks_before_a_tensor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        pass

    def reached(*given: Any, **options: Any) -> None:
        raise Reached

    monkeypatch.setattr(Executor, "__init__", reached)
    monkeypatch.setattr(experts, "MAX_TURNS", 21)  # 32 requests, no drafts: 64 pairs, 22 turns
    with pytest.raises(ConfigError, match="22 turns"):
        SimulatedExecutor(program(), options(), device="cuda")
    for mode, device in (("piecewise", "cuda"), ("full_and_piecewise", "cpu")):
        with pytest.raises(Reached):
            SimulatedExecutor(program(), options(mode), device=device)
