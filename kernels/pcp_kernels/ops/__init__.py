# SPDX-License-Identifier: Apache-2.0
"""Operators over the kernels: opaque to torch.compile, with shapes for tracing, the same on every device.

On CUDA a call launches the generated kernel. On CPU it runs :mod:`pcp_kernels.reference`, or the generated kernel in
Triton's interpreter if ``PCP_KERNELS=interpreter`` (see :mod:`pcp_kernels.device`). fp64 arguments are for the
reference alone. Arguments that do not fit raise ValueError with every fault named.
"""

from pcp_kernels.ops.index import index_prep, index_remap, index_scatter, select_owner_rows
from pcp_kernels.ops.mla import sparse_mla, sparse_mla_records
from pcp_kernels.ops.paged import paged_attend_records, paged_attend_rows
from pcp_kernels.ops.records import dsa_pack, index_pack, latent_pack, latent_unpack, latent_width
from pcp_kernels.ops.topk import index_topk_paged, index_topk_rows

__all__ = [
    "dsa_pack",
    "index_pack",
    "index_prep",
    "index_remap",
    "index_scatter",
    "index_topk_paged",
    "index_topk_rows",
    "latent_pack",
    "latent_unpack",
    "latent_width",
    "paged_attend_records",
    "paged_attend_rows",
    "select_owner_rows",
    "sparse_mla",
    "sparse_mla_records",
]
