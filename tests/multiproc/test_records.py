# SPDX-License-Identifier: Apache-2.0
"""Two real processes gather records over gloo, and hold the bytes that one rank makes alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing

from tests.multiproc import _records
from tests.unit.passes import test_pack_records as layer

pytestmark = pytest.mark.multiproc
PCP = 2


def test_ranks_hold_the_records_of_one(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_records.run, args=(PCP, str(tmp_path)), nprocs=PCP)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(PCP)]
    for store in _records.STORES:
        caches, (expected, _) = layer.run(store, store)
        found = torch.cat([rank[store]["out"] for rank in ranks])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        other = torch.cat([rank[store]["out"] for rank in reversed(ranks)])
        assert (other - expected).abs().max() > 1e-2, "ranks exchanged: the comparison can fail"
        for name, rows in caches[0].tensors.items():
            for rank in ranks:
                assert torch.equal(rank[store]["caches"][name].view(torch.uint8), rows.view(torch.uint8)), name
    rows = layer.ROWS // PCP
    sent = {store: (ranks[0][store]["calls"], ranks[0][store]["bytes"]) for store in _records.STORES}
    assert sent == {"native": (1, rows * 56 * 8), "fp8": (1, rows * 72)}
