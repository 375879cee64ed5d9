# SPDX-License-Identifier: Apache-2.0
"""A whole decode step's paged ops in one CUDA graph: replayed with other lengths, tables and slots, against a CPU.

Capturing is the check that nothing is read on the host: PyTorch refuses a read while a graph is captured.
"""

from __future__ import annotations

import pytest
import torch

from pcp_passes.paged import AttentionInputs, PagedCaches, kv_attend, kv_write, mla_attend, running
from pcp_passes.paged.experts import experts_op

pytestmark = pytest.mark.gpu

PAGE, COLUMNS, REQUESTS, ROWS = 16, 4, 3, 8
HEADS, KV_HEADS, D, LATENT, ROPE = 8, 2, 64, 128, 32
EXPERTS, WIDTH, HIDDEN, INNER = 8, 2, 64, 128
LENGTHS = ((20, 37, 64), (5, 0, 33))
"""Of two steps; each request has two rows, and the last two rows are padding."""


class Step:
    """Operands of a step on a device; both steps lie in the same tensors."""

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        self.caches = PagedCaches(REQUESTS * COLUMNS, PAGE, torch.bfloat16, device)
        for name, heads, width in (("l.k", KV_HEADS, D), ("l.v", KV_HEADS, D), ("m.k", 1, LATENT), ("m.v", 1, ROPE)):
            self.caches.tensors[name] = normal(REQUESTS * COLUMNS, PAGE, heads, width)
        self.q, self.k, self.v = normal(ROWS, HEADS, D), normal(ROWS, KV_HEADS, D), normal(ROWS, KV_HEADS, D)
        self.absorbed = normal(ROWS, HEADS, LATENT + ROPE)
        self.hidden, self.gate_up = normal(ROWS, HIDDEN), normal(EXPERTS, 2 * INNER, HIDDEN) / 8
        self.down, self.weights = normal(EXPERTS, HIDDEN, INNER) / 8, normal(ROWS, WIDTH).float().abs()
        self.sinks = normal(HEADS).float()
        self.chosen = torch.zeros(ROWS, WIDTH, dtype=torch.int64, device=device)
        self.slots = torch.full((ROWS,), -1, device=device)
        self.tables = torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32, device=device)
        self.starts = torch.zeros(REQUESTS + 1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(REQUESTS, dtype=torch.int32, device=device)
        self.positions = torch.zeros(ROWS, dtype=torch.int64, device=device)

    def fill(self, number: int) -> None:
        """What a planner would write before step ``number``."""
        generator = torch.Generator().manual_seed(number + 1)
        lengths = torch.tensor(LENGTHS[number])
        tables = torch.randperm(REQUESTS * COLUMNS, generator=generator).view(REQUESTS, COLUMNS)
        rows = torch.where(lengths > 0, 2, 0)
        request = torch.repeat_interleave(torch.arange(REQUESTS), rows)
        positions = lengths[request] - 2 + torch.arange(len(request)) % 2
        slots = tables[request, positions // PAGE] * PAGE + positions % PAGE
        missing = ROWS - len(request)
        self.chosen.copy_(torch.stack([torch.randperm(EXPERTS, generator=generator)[:WIDTH] for _ in range(ROWS)]))
        self.slots.copy_(torch.nn.functional.pad(slots, (0, missing), value=-1))
        self.tables.copy_(tables)
        self.starts.copy_(torch.cat([torch.zeros(1, dtype=torch.int64), rows.cumsum(0)]))
        self.lengths.copy_(lengths)
        self.positions.copy_(torch.nn.functional.pad(positions, (0, missing)))

    def run(self) -> tuple[torch.Tensor, ...]:
        inputs = AttentionInputs(self.slots, "replicated", self.tables, self.starts, self.lengths, self.positions)
        with running(self.caches, inputs):
            dep = kv_write(self.k, self.v, "l")
            return (
                kv_attend(self.q, dep, "l", sinks=self.sinks),
                kv_attend(self.q, dep, "l", left=9, softcap=20.0),
                mla_attend(self.absorbed, dep, "m", scale=0.1, latent=LATENT),
                experts_op(self.hidden, self.chosen, self.weights, self.gate_up, self.down, "silu"),
            )


def test_one_graph_serves_every_length() -> None:
    there, here = Step("cuda"), Step("cpu")
    there.fill(0)
    there.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = there.run()
    outputs = []
    for number in (0, 1):
        for step in (there, here):
            step.fill(number)
        graph.replay()
        torch.cuda.synchronize()
        wanted = here.run()
        outputs.append([found.cpu().float() for found in captured])
        for found, one in zip(outputs[-1], wanted, strict=True):
            torch.testing.assert_close(found, one.float(), rtol=2e-2, atol=3e-2)
        padding = int(here.starts[-1])
        assert all(not found[padding:].any() for found in outputs[-1][:3])
    for name, held in here.caches.tensors.items():
        torch.testing.assert_close(there.caches.tensors[name].cpu(), held, rtol=0, atol=0)
    assert all(not torch.allclose(one, other, atol=0.1) for one, other in zip(*outputs, strict=True))
