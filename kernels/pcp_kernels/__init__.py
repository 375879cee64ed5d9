# SPDX-License-Identifier: Apache-2.0
"""Kernels of pcp_passes, each with an eager reference that defines what it computes.

Slot expansion is written by hand; sparse indexing, and attention over paged caches that a CUDA graph can hold, are
generated: :mod:`pcp_kernels.specs` says what can be,
:mod:`pcp_kernels.generate` writes it, :mod:`pcp_kernels.reference` defines it, :mod:`pcp_kernels.ops` runs it.

Importing this package needs PyTorch alone, and registers the operators ``torch.ops.pcp_kernels``. A kernel's Triton
source is imported when it is launched or compiled.
"""

from pcp_kernels.expand_slots import PAD_SLOT_ID, expand_slots, expand_slots_reference
from pcp_kernels.ops import (
    dsa_pack,
    index_pack,
    index_prep,
    index_remap,
    index_scatter,
    latent_pack,
    latent_unpack,
    paged_attend_records,
    paged_attend_rows,
    select_owner_rows,
    sparse_mla,
    sparse_mla_records,
)
from pcp_kernels.ops.topk import index_topk_paged, index_topk_rows
from pcp_kernels.specs import KernelSpec, UnsupportedSpec

__all__ = [
    "PAD_SLOT_ID",
    "KernelSpec",
    "UnsupportedSpec",
    "dsa_pack",
    "expand_slots",
    "expand_slots_reference",
    "index_pack",
    "index_prep",
    "index_remap",
    "index_scatter",
    "index_topk_paged",
    "index_topk_rows",
    "latent_pack",
    "latent_unpack",
    "paged_attend_records",
    "paged_attend_rows",
    "select_owner_rows",
    "sparse_mla",
    "sparse_mla_records",
]
