# SPDX-License-Identifier: Apache-2.0
"""Partial results of the generated attention kernel merge like those of the reference: an empty part marks itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pcp_kernels import ops
from pcp_kernels.reference import mla as reference
from pcp_passes.attention.merge import merge_partials
from tests.interpreted import Interpreted

SCALE = 0.3


def kernel(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return ops.sparse_mla(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context_and_own_keys_make_the_whole(interpreted: Interpreted, dtype: torch.dtype) -> None:
    """Three rows with 0, 5 and 40 keys of context and one of their own; row 0 of the cache, which -1 reads, is NaN."""
    rng = torch.Generator().manual_seed(3)
    q, latent, rope = (torch.randn(*s, generator=rng).to(dtype) for s in ((3, 4, 48), (64, 32), (64, 16)))
    latent[0], rope[0] = math.nan, math.inf
    context = torch.full((3, 48), -1, dtype=torch.int32)
    context[1, :5], context[2, :40] = torch.arange(1, 6), torch.arange(1, 41)
    own = torch.full((3, 16), -1, dtype=torch.int32)
    own[:, 3] = torch.tensor([50, 51, 52])
    both = torch.cat((context, own), dim=1)

    def partial(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return interpreted(kernel, q, latent, rope, slots, SCALE)

    parts = [partial(context), partial(own)]
    assert bool((parts[0][1][0] == -math.inf).all())
    whole = reference.sparse_mla(q.double(), latent.double(), rope.double(), both, SCALE)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    out, lse = merge_partials(*zip(*parts, strict=True))
    assert (out - whole[0]).abs().max() < tolerance
    assert (lse - whole[1]).abs().max() < tolerance
    parts[0][0][0] = math.nan  # as a buffer that no kernel wrote
    assert torch.equal(merge_partials(*zip(*parts, strict=True))[0], out)
    parts[0][1][0] = 0.0
    assert merge_partials(*zip(*parts, strict=True))[0][0].isnan().all(), "the mark decides"
