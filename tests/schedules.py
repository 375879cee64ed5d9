# SPDX-License-Identifier: Apache-2.0
"""Random multi-step schedules of a toy decoder: our layout, our step plan and a rewritten body on P simulated ranks,
against one unsharded rank. Requests arrive, are prefilled in chunks, decode, and leave their blocks to others.

Everything that a step reuses is reused here: one StepPlan per rank for the whole schedule, one cache per rank. After
each step hidden states of real tokens must agree, owned cache slots too, and every other slot must be untouched.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from pcp_passes.layout import Batch, build_layout
from pcp_passes.passes import PassContext, build_variants
from pcp_passes.plan import StepPlan
from pcp_passes.simulate import simulate
from tests import toy, toy_runs

MAX_TOKENS = 64
BLOCKS = 48


@dataclass
class Request:
    """A prompt of ``prompt`` tokens, then ``decodes`` one-token steps; ``blocks`` are its cache blocks."""

    prompt: int
    decodes: int
    blocks: list[int]
    computed: int = 0


@dataclass
class Schedule:
    """One random schedule; ``run`` raises AssertionError at the first disagreement."""

    seed: int
    pcp: int
    kind: str
    decode: str
    model_kind: str = "dense"
    steps: int = 8
    budget: int = 24
    replicated_steps: int = field(default=0, init=False)

    def run(self) -> Schedule:
        """Execute all steps and compare after each."""
        rng = random.Random(self.seed)
        model, capture = toy_runs.captured(self.model_kind, dtype=torch.float64)
        bodies = _bodies(self.model_kind, self.pcp)
        slots = BLOCKS * toy.BLOCK
        one = {layer.name: _noise(slots, model.cache_width, self.seed) for layer in model.layers}
        many = [{name: values.clone() for name, values in one.items()} for _ in range(self.pcp)]
        plans = [
            StepPlan(self.pcp, r, max_tokens=MAX_TOKENS, max_rows=MAX_TOKENS, device="cpu") for r in range(self.pcp)
        ]
        free, running = list(range(1, BLOCKS)), list[Request]()
        for _ in range(self.steps):
            while len(running) < 4 and rng.random() < 0.7:
                prompt, decodes = rng.choice((1, 2, 3, 2 * self.pcp, rng.randrange(1, 40))), rng.randrange(4)
                count = -(-(prompt + decodes) // toy.BLOCK)
                if count > len(free):
                    break
                rng.shuffle(free)
                running.append(Request(prompt, decodes, [free.pop() for _ in range(count)]))
            if not running:
                continue
            self._step(running, _chunks(running, rng, self.budget), bodies, capture, model, one, many, plans)
            for request in [r for r in running if r.computed == r.prompt + r.decodes]:
                running.remove(request)
                free += request.blocks
        return self

    def _step(
        self,
        running: list[Request],
        new: list[int],
        bodies: Any,
        capture: Any,
        model: Any,
        one: Any,
        many: Any,
        plans: Any,
    ) -> None:
        batch = [(r, n) for r, n in zip(running, new, strict=True) if n]
        computed = np.array([r.computed for r, _ in batch], dtype=np.int32)
        lengths = np.array([n for _, n in batch], dtype=np.int32)
        prompts = np.array([r.prompt for r, _ in batch], dtype=np.int32)
        positions = torch.cat([torch.arange(r.computed, r.computed + n) for r, n in batch])
        tables = torch.zeros(len(batch), BLOCKS, dtype=torch.long)
        for row, (request, _) in enumerate(batch):
            tables[row, : len(request.blocks)] = torch.tensor(request.blocks)
        owner = torch.repeat_interleave(torch.arange(len(batch)), torch.tensor(lengths.tolist()))
        slots = tables[owner, positions // toy.BLOCK] * toy.BLOCK + positions % toy.BLOCK
        ids = torch.randint(
            0, 61, (len(positions),), generator=torch.Generator().manual_seed(self.seed + len(positions))
        )

        before = [{name: values.clone() for name, values in caches.items()} for caches in many]
        starts = [0, *np.cumsum(lengths).tolist()]
        with toy.running(toy.Step(one, slots, starts, (computed + lengths).tolist(), tables)):
            wanted = capture.gm(*capture.bind(ids, positions))[0]

        layout = build_layout(Batch(lengths, computed, prompts), self.pcp, kind=self.kind, decode=self.decode)
        if layout.is_replicated:
            self.replicated_steps += 1
            for rank in range(self.pcp):
                with toy.running(toy.Step(many[rank], slots, starts, (computed + lengths).tolist(), tables)):
                    hidden = bodies["replicated"](*capture.bind(ids, positions))[0]
                _close(hidden, wanted, "hidden states of a replicated step")
        else:
            steps, inputs = [], []
            for rank, plan in enumerate(plans):
                plan.load(layout)
                view = plan.shard_tokens(ids, positions)
                expanded = plan.expand_slots(slots[None])[0]
                rows = view.row_request
                steps.append(
                    toy.Step(many[rank], expanded, view.query_start_loc.tolist(), view.seq_lens.tolist(), tables[rows])
                )
                inputs.append(capture.bind(view.input_ids.long(), view.positions))
            outputs = simulate(bodies["sharded"], inputs, rank_context=lambda rank: toy.running(steps[rank]))
            _close(plans[0].restore_rows(torch.cat([o[0] for o in outputs])), wanted, "hidden states")
        untouched = torch.ones(BLOCKS * toy.BLOCK, dtype=torch.bool)
        untouched[slots] = False
        for rank in range(self.pcp):
            for name, values in many[rank].items():
                _close(values[slots], one[name][slots], f"rank {rank}'s new cache rows of {name}")
                same = torch.equal(values[untouched], before[rank][name][untouched])
                assert same, f"rank {rank} wrote a slot of {name} that the step does not own"
        for request, count in batch:
            request.computed += count


def _chunks(running: list[Request], rng: random.Random, budget: int) -> list[int]:
    new = []
    for request in running:
        left = request.prompt - request.computed
        want = 1 if left <= 0 else rng.choice((left, max(1, left // 2), 1))
        new.append(min(want, budget))
        budget -= new[-1]
    return new


def _noise(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _close(found: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    gap = (found - wanted).abs().max().item() if wanted.numel() else 0.0
    assert gap <= 1e-9, f"{what} differ by {gap:.1e}"


@cache
def _bodies(model_kind: str, pcp: int) -> dict[str, Any]:
    _, capture = toy_runs.captured(model_kind, dtype=torch.float64)
    return dict(build_variants(capture.gm, PassContext(pcp)))
