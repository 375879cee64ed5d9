# SPDX-License-Identifier: Apache-2.0
"""Ragged requests in steps: the inputs of a body on one device, and on P ranks in the zigzag layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from pcp_passes.layout import Batch, build_layout
from pcp_passes.paged import AttentionInputs, PagedCaches, running
from pcp_passes.simulate import simulate

SIZE = 4
Change = Callable[[AttentionInputs], AttentionInputs]
Schedule = Sequence[Sequence[int]]


class Requests:
    """Sequences whose blocks are dealt in shuffled order."""

    def __init__(self, ids: Sequence[torch.Tensor]) -> None:
        self.ids = ids
        self.done = [0] * len(ids)
        needed = [-(-len(one) // SIZE) for one in ids]
        self.blocks = sum(needed) + 3
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(3))
        self.tables = torch.zeros(len(ids), max(needed), dtype=torch.int32)
        for request, blocks in enumerate(order[: sum(needed)].split(needed)):
            self.tables[request, : len(blocks)] = blocks.int()

    def caches(self, dtype: torch.dtype = torch.float64) -> PagedCaches:
        return PagedCaches(self.blocks, SIZE, dtype)

    def next(self, rows: Sequence[int]) -> Step:
        """The next ``rows`` tokens of each request."""
        active = [request for request, count in enumerate(rows) if count]
        spans = {request: (self.done[request], self.done[request] + rows[request]) for request in active}
        for request, (_, stop) in spans.items():
            self.done[request] = stop
        return Step(self, active, [spans[request] for request in active])


class Step:
    """One batch: request ``active[i]`` runs the tokens of ``spans[i]``."""

    def __init__(self, requests: Requests, active: list[int], spans: list[tuple[int, int]]) -> None:
        self.active, self.spans = active, spans
        self.ids = torch.cat([requests.ids[r][a:b] for r, (a, b) in zip(active, spans, strict=True)])
        self.positions = torch.cat([torch.arange(a, b) for a, b in spans])
        self.tables = requests.tables[active]
        row = torch.repeat_interleave(torch.arange(len(active)), torch.tensor([b - a for a, b in spans]))
        block = self.tables[row, self.positions // SIZE].long()
        self.slots = block * SIZE + self.positions % SIZE

    def inputs(self, padding: int = 0) -> AttentionInputs:
        """For the replicated body, with padding rows at the end."""
        starts = np.cumsum([0, *(b - a for a, b in self.spans)])
        return AttentionInputs(
            slots=torch.nn.functional.pad(self.slots, (0, padding), value=-1),
            slot_layout="replicated",
            block_tables=self.tables,
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.tensor([b for _, b in self.spans]),
            positions=torch.nn.functional.pad(self.positions, (0, padding)),
        )

    def run(self, body: fx.GraphModule, caches: PagedCaches, *extra: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Output rows of the replicated body, real rows only."""
        ids = torch.nn.functional.pad(self.ids, (0, padding))
        inputs = self.inputs(padding)
        more = [torch.nn.functional.pad(one, (0, 0, 0, padding)) for one in extra]
        with torch.no_grad(), running(caches, inputs):
            out = body(ids, inputs.positions, *more)
        first: torch.Tensor = out if isinstance(out, torch.Tensor) else out[0]
        return first[: len(self.ids)]

    def run_sharded(
        self,
        body: fx.GraphModule,
        caches: Sequence[PagedCaches],
        *extra: torch.Tensor,
        change: Change = lambda inputs: inputs,
    ) -> torch.Tensor:
        """Output rows in global order of the sharded body on one simulated rank per cache."""
        arguments, inputs, restore = self.sharded(len(caches), *extra)
        inputs = [change(held) for held in inputs]
        with torch.no_grad():
            outputs = simulate(body, arguments, rank_context=lambda rank: running(caches[rank], inputs[rank]))
        first = [out if isinstance(out, torch.Tensor) else out[0] for out in outputs]
        return torch.cat(first)[restore]

    def sharded(
        self, pcp: int, *extra: torch.Tensor
    ) -> tuple[list[list[torch.Tensor]], list[AttentionInputs], torch.Tensor]:
        """What each of ``pcp`` ranks gives the sharded body, under what, and where its output rows belong."""
        none = np.array([a for a, _ in self.spans], dtype=np.int32)
        lengths = np.array([b - a for a, b in self.spans], dtype=np.int32)
        layout = build_layout(Batch(lengths, none, none + lengths, is_prefilling=np.ones(len(none), dtype=bool)), pcp)
        gather, mask = torch.from_numpy(layout.gather_index), torch.from_numpy(layout.write_mask)
        slots = self.slots[gather].masked_fill(~mask, -1)
        per_rank, inputs, arguments = layout.padded_tokens, [], []
        for rank in range(pcp):
            local = gather[rank * per_rank : (rank + 1) * per_rank]
            rows = layout.rows(rank)
            starts = torch.from_numpy(rows.query_start_loc)
            positions = self.positions[local]
            positions[int(starts[-1]) :] = 0
            lasts = positions[(starts[1:] - 1).clamp(min=0).long()] + 1
            held = AttentionInputs(
                slots=slots,
                slot_layout="rank_major",
                block_tables=self.tables[torch.from_numpy(rows.row_request)],
                query_start_loc=starts,
                seq_lens=lasts.masked_fill(starts[1:] == starts[:-1], 0),
                positions=positions,
            )
            inputs.append(held)
            arguments.append([self.ids[local], positions, *(one[local] for one in extra)])
        return arguments, inputs, torch.from_numpy(layout.restore_index)


def without_gather(inputs: AttentionInputs) -> AttentionInputs:
    """Only what the first rank brought is written: what a missing gather leaves in the cache."""
    kept = inputs.slots.clone()
    kept[inputs.rows :] = -1
    return replace(inputs, slots=kept)


def mislabelled(inputs: AttentionInputs) -> AttentionInputs:
    """The right slots under the wrong label."""
    return replace(inputs, slot_layout="replicated")
