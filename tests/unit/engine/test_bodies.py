# SPDX-License-Identifier: Apache-2.0
"""Capture of a module over token rows, and the bodies made of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pcp_passes import paged
from pcp_passes.collectives import is_collective
from pcp_passes.engine.bodies import Model, capture, keeping_double, make_bodies, prepare, trace
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.ir import meta, rules
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import PassContext
from pcp_passes.simulate import simulate

HIDDEN = 8


class Block(nn.Module):
    """One attention layer that rounds to float32 on its way, as norms of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, HIDDEN)
        self.inner = nn.ModuleDict({"qkv": nn.Linear(HIDDEN, 3 * HIDDEN)})
        self.register_buffer("factor", torch.tensor(0.5), persistent=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + positions[:, None] * self.factor * 0.01
        q, k, v = self.inner["qkv"](self.norm(x)).unflatten(-1, (3, 2, HIDDEN // 2)).unbind(1)
        out = paged.kv_attend(q, paged.kv_write(k, v, "target.0"), "target.0")
        return x + out.flatten(1)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = F.softmax(wide.float(), dim=-1, dtype=torch.float32)
        return wide.to(x.dtype) + wide.type(torch.float32).to(x.dtype)


def rows(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(count) % 20, torch.arange(count)


def inputs(count: int) -> paged.AttentionInputs:
    held = torch.arange(count)
    tables = torch.arange(8, dtype=torch.int32)[None]
    return paged.AttentionInputs(
        held, "replicated", tables, torch.tensor([0, count]), torch.tensor([count]), held
    )  # fmt: skip


def caches() -> paged.PagedCaches:
    return paged.PagedCaches(8, 4, torch.float64)


def test_bodies_take_any_row_count() -> None:
    module = Block().double().eval()
    bodies = capture(module, rows(), PassContext(2))
    assert sorted(bodies) == ["replicated", "sharded"]
    for count in (1, 2, 6, 17):
        with torch.no_grad(), paged.running(caches(), inputs(count)):
            found = bodies["replicated"](*rows(count))
        with torch.no_grad(), paged.running(caches(), inputs(count)), keeping_double():
            expected = module(*rows(count))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def test_float64_stays_float64_and_float32_is_left_alone() -> None:
    """The same module, run as it is, rounds to 1e-8."""
    module = Block().double().eval()
    gm = trace(module, rows())
    for node in gm.graph.find_nodes(op="placeholder") + [n for n in gm.graph.nodes if n.op == "call_function"]:
        assert all(held.dtype != torch.float32 for held in meta.tensors(node)), f"%{node.name}"
    with torch.no_grad(), paged.running(caches(), inputs(6)):
        rounded, kept = module(*rows()), gm(*rows())
    assert 1e-10 < (rounded - kept).abs().max() < 1e-6
    half = trace(Block().half().eval(), rows())
    assert any(held.dtype == torch.float32 for node in half.graph.nodes for held in meta.tensors(node))


def test_parameters_keep_their_names_and_are_shared() -> None:
    module = Block().eval()
    gm = capture(module, rows(), PassContext(2))["sharded"]
    mine = dict(gm.named_parameters())
    assert mine.keys() == {"embed.weight", "inner.qkv.weight", "inner.qkv.bias"}
    assert all(held is module.get_parameter(name) for name, held in mine.items())
    assert dict(gm.named_buffers()).keys() == {"factor"}
    assert [node.name for node in gm.graph.find_nodes(op="placeholder")] == ["ids", "positions"]


def test_only_the_sharded_body_communicates_and_labels_its_writes() -> None:
    bodies = capture(Block().eval(), rows(), PassContext(2))
    labels = {}
    for variant, body in bodies.items():
        [write] = [node for node in body.graph.nodes if rules.op_name(node) == paged.ops.KV_WRITE]
        labels[variant] = rules.named_argument(write, "layout") or "replicated"
        assert any(is_collective(node) for node in body.graph.nodes) == (variant == "sharded")
    assert labels == {"sharded": "rank_major", "replicated": "replicated"}


def test_bodies_for_another_number_of_ranks() -> None:
    module = Block().double().eval()
    captured = {"": prepare(module, rows())}
    model = Model(
        "block", make_bodies(captured, PassContext(2)), nn.Identity(), HIDDEN, 20, ("target.0",), torch.float64,
        captured=captured,
    )  # fmt: skip
    four = model.over(PassContext(4))
    texts = [print_graph(made.bodies["sharded"]) for made in (model, four)]
    assert texts[0] != texts[1] and texts[0].replace(", 2, 'pcp'", ", 4, 'pcp'").count("4, 'pcp'") == 1
    assert print_graph(model.bodies["replicated"]) == print_graph(four.bodies["replicated"])
    # One request of 8 tokens on four ranks, two rows each, in order: ranks see what the ones before them wrote.
    held = [caches() for _ in range(4)]
    ids, positions = rows(8)
    steps = []
    for rank in range(4):
        mine = positions[2 * rank : 2 * rank + 2]
        steps.append(
            paged.AttentionInputs(
                positions, "rank_major", torch.arange(8, dtype=torch.int32)[None], torch.tensor([0, 2]),
                mine[-1:] + 1, mine,
            )
        )  # fmt: skip
    given = [(ids[2 * rank : 2 * rank + 2], steps[rank].positions) for rank in range(4)]
    with torch.no_grad():
        found = simulate(
            four.bodies["sharded"], given, rank_context=lambda rank: paged.running(held[rank], steps[rank])
        )
    with torch.no_grad(), paged.running(caches(), inputs(8)):
        expected = four.bodies["replicated"](ids, positions)
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-14)


def test_a_second_capture_is_the_same_text() -> None:
    texts = [print_graph(capture(Block().eval(), rows(), PassContext(2))["sharded"]) for _ in range(2)]
    assert texts[0] == texts[1]


class Several(Block):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        out = super().forward(ids, positions)
        return out, self.embed(ids)


def test_extra_outputs_come_as_a_tuple() -> None:
    body = capture(Several().eval(), rows(), PassContext(2))["replicated"]
    with torch.no_grad(), paged.running(caches(), inputs(5)):
        found = body(*rows(5))
    assert isinstance(found, tuple) and [tuple(one.shape) for one in found] == [(5, HIDDEN)] * 2


class Mixes(Block):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = super().forward(ids, positions)
        return out - out.mean(0)


class Branches(Block):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, positions) * len(ids).__int__()


class Keeps(Block):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        self.factor.add_(1)
        return super().forward(ids, positions)


class Reads(Block):
    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return super().forward(ids, positions) * float(ids.sum().item())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Mixes(), "mixes tokens"),
        (Branches(), "captured for one row count only"),
        (Keeps(), "writes into 1 of its inputs or buffers"),
        (Reads(), "cannot be captured over token rows"),
    ],
)
def test_what_cannot_be_a_body_is_refused(module: Block, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        capture(module.eval(), rows(), PassContext(2))


def test_examples_share_a_row_count() -> None:
    with pytest.raises(ConfigError, match=r"\[5, 6\] rows"):
        capture(Block().eval(), (torch.arange(5), torch.arange(6)), PassContext(2))
    with pytest.raises(ConfigError, match=r"\[1\] rows"):
        capture(Block().eval(), rows(1), PassContext(2))
