# SPDX-License-Identifier: Apache-2.0
"""Sparse-MLA indexing in eager PyTorch: the definition of every kernel, and the implementation on CPUs.

The contract, which every implementation keeps:

**Score.** ``score[i, j] = k_scale[j] * sum_h w[i, h] * relu(q[i, h] . k[j])``, an fp32 number (fp64 when the queries
are fp64, here only). Here it is summed in fp64 and rounded once, so it does not depend on shapes or libraries; a kernel
sums in fp32 in its own fixed order, and equals this one bit for bit wherever every sum is exact. relu is
``max(x, 0)`` with the NaN dropped: a NaN of ``q . k`` counts as 0, a NaN weight or scale makes the score NaN.

**Order.** Score descending, then key index ascending: a total order. -0 equals +0. NaN is below every number and above
what is not a key at all. See :mod:`pcp_kernels.reference.order`.

**Selection.** Row ``i`` sees the ``n = max(ke[i] - ks[i], 0)`` keys from ``ks[i]`` (0 when paged) up to ``ke[i]``. The
output is i32 ``[T, topk]``: the first ``min(n, topk)`` keys of the order as indices relative to ``ks[i]``, ascending,
unique, below ``n``, then -1. ``n <= topk`` selects every key unscored.

**Rows.** ``ke[i] = positions[i] + 1``, 0 on rows of padding, which select nothing. Which rank runs a row, and in what
layout, is in this number and nowhere else. Several rows of a request (verification) differ in ``ke`` alone.

**Independence.** From the same records, queries and weights, the selection is the same bytes however rows are spread
over ranks, keys over pages, splits or tiles, and whatever the workspace; a record depends on its own token alone.

**Workspace.** ``workspace_bytes`` bounds all temporaries of a call together; inputs, outputs and a few integers per
row are not counted.

**Offsets.** Slots and byte offsets are int64 until they are known to fit: page * 8448 passes 2**31 at 16 M tokens.

**FP8.** Scales are powers of two, found in integers: :mod:`pcp_kernels.reference.quant`. Records and pages:
:mod:`pcp_kernels.reference.pack` and :mod:`pcp_kernels.reference.cache`.
"""

from __future__ import annotations
