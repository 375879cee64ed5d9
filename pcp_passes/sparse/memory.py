# SPDX-License-Identifier: Apache-2.0
"""What one layer's selection of keys holds in memory, measured, beside what the unlowered graph would.

::

    found = measure_index_step(rows=8192, keys=32768, heads=32, dim=128, topk=2048)
    assert found.peak_bytes <= found.budget_bytes + found.output_bytes

The selection is run for real on the paged cache of one request, the step being its last ``rows`` tokens; a dispatch
mode adds up the storages that are alive. What a matrix product holds inside itself is not seen.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.live_bytes import LiveBytes
from pcp_passes.paged.index import best_keys
from pcp_passes.paged.state import REPLICATED_SLOTS, AttentionInputs
from pcp_passes.sparse.backends import DEFAULT_WORKSPACE_BYTES

PAGE = 64
STORES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.uint8}


@dataclass(frozen=True)
class IndexMemory:
    """Bytes of one layer's selection."""

    rows: int
    """Query rows of the step."""
    measured_rows: int
    """Of these, how many were run: the last ones, which see most keys."""
    keys: int
    heads: int
    dim: int
    topk: int
    store: str
    budget_bytes: int
    """The stated workspace."""
    peak_bytes: int
    """Measured: temporaries and the output, without the operands."""
    output_bytes: int
    """Of the rows that were measured."""
    seconds: float

    @property
    def unlowered_bytes(self) -> int:
        """Computed: the scores of every head in fp32 that the captured graph makes, ``H * T * T`` of the prompt."""
        return 4 * self.heads * self.keys * self.keys

    @property
    def scores_bytes(self) -> int:
        """Computed: one fp32 score for each row and key of the step, which a kernel without tiles would hold."""
        return 4 * self.rows * self.keys

    @property
    def within(self) -> bool:
        """Whether the temporaries kept to the budget."""
        return self.peak_bytes <= self.budget_bytes + self.output_bytes

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            **asdict(self), "unlowered_bytes": self.unlowered_bytes, "scores_bytes": self.scores_bytes,
            "within": self.within,
        }  # fmt: skip


def measure_index_step(
    *,
    rows: int = 8192,
    keys: int = 32768,
    heads: int = 32,
    dim: int = 128,
    topk: int = 2048,
    store: str = "bf16",
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    measured_rows: int | None = None,
) -> IndexMemory:
    """Run the selection of one layer on the CPU and measure what it holds.

    Args:
        rows: of the step, the last ones of a request of ``keys`` tokens.
        heads, dim, topk: of the indexer.
        store: of the index cache, ``bf16``, ``fp32`` or ``fp8``.
        workspace_bytes: the budget.
        measured_rows: how many of the rows to run, for want of time; all by default. Tiles are sized by the budget, so
            the peak is that of all rows once there are more than one tile has.

    Raises:
        ConfigError: an unknown store, or counts that do not fit together.
    """
    count = rows if measured_rows is None else measured_rows
    if store not in STORES or not 1 <= count <= rows <= keys:
        raise ConfigError(
            f"found store={store!r}, {count} measured of {rows} rows and {keys} keys; required one of "
            f"{', '.join(STORES)}, and at most as many rows as keys"
        )
    generator = torch.Generator().manual_seed(0)
    pages = -(-keys // PAGE)
    dtype = torch.float32 if store == "fp8" else STORES[store]
    q = torch.randn(count, heads, dim, generator=generator, dtype=torch.float32).to(dtype)
    weights = torch.randn(count, heads, generator=generator, dtype=torch.float32)
    if store == "fp8":
        from pcp_kernels.ops import index_pack, index_scatter

        cache = torch.zeros(pages, PAGE * (dim + 4), dtype=torch.uint8)
        held = index_pack(torch.randn(keys, dim, generator=generator), store="fp8")
        index_scatter(cache, held, torch.arange(keys))
    else:
        cache = torch.randn(pages * PAGE, dim, generator=generator).to(dtype).view(pages, PAGE, 1, dim)
    inputs = AttentionInputs(
        slots=torch.full((count,), -1),
        slot_layout=REPLICATED_SLOTS,
        block_tables=torch.randperm(pages, generator=generator).to(torch.int32)[None],
        query_start_loc=torch.tensor([0, count]),
        seq_lens=torch.tensor([keys]),
        positions=torch.arange(keys - count, keys),
    )
    _ = inputs.tables, inputs.row_request, inputs.visible  # made once per step, not per layer: before the counting
    with torch.no_grad(), LiveBytes() as live:
        begin = time.perf_counter()
        out = best_keys(q, weights, cache, inputs, topk, page=PAGE, workspace_bytes=workspace_bytes)
        seconds = time.perf_counter() - begin
    return IndexMemory(rows, count, keys, heads, dim, topk, store, workspace_bytes, live.peak, out.nbytes, seconds)
