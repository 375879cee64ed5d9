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

**Bounds.** The same in every implementation: ``ks`` and ``ke`` are clamped to ``[0, N]``, paged: ``ke`` to the keys
that a row of the block table can name. A negative request is none: its rows select nothing, and their indices have no
slots. What cannot be meant is a ValueError on CPU: a request past the table on a row with keys, a page that the cache
does not have, a slot or row past the last. A GPU is not made to wait for such a look: there such a request has no keys,
its indices no slots, and such a row is another rank's; numbers of pages, and slots of the attention, are trusted.

**Independence.** From the same records, queries and weights, the selection is the same bytes however rows are spread
over ranks, keys over pages, splits or tiles, and whatever the workspace; a record depends on its own token alone.

**Workspace.** ``workspace_bytes`` bounds all temporaries of a call together; inputs, outputs and a few integers per
row are not counted. A workspace that is negative, or too small for what has to be scored, is a ValueError.

**Offsets.** Slots and byte offsets are int64 until they are known to fit: page * 8448 passes 2**31 at 16 M tokens.

**FP8.** Scales are powers of two, found in integers: :mod:`pcp_kernels.reference.quant`. Records and pages:
:mod:`pcp_kernels.reference.pack` and :mod:`pcp_kernels.reference.cache`.
"""

from __future__ import annotations
