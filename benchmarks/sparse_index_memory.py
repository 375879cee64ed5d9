# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of a sparse-index step on CPU: 8,192 new tokens on 32,768 keys, 32 heads of 128, the best 2,048.

The selection of one layer runs for real on its paged cache, and the storages that are alive meanwhile are added up. It
is what an unlowered graph makes a tensor ``[heads, tokens, keys]`` for; here its temporaries stay within a stated
budget, whatever the numbers of rows and keys. What is linear in the step's tokens is reported beside it: prepared
queries, records, the result.

Takes some minutes. ``--measured 512`` lets only the last 512 tokens select: a tile of scores is as large for them, and
only the FP8 queries that are made for an FP8 cache, a byte per value, are fewer.

    python benchmarks/sparse_index_memory.py [--rows 8192] [--keys 32768] [--measured ROWS] [--workspace-mib 256]
                                             [--store fp8|bf16|fp32] [--json] [--check]

``--check`` exits with 1 when the selection's temporaries exceed the budget.
"""

from __future__ import annotations

import argparse
import json
import sys

import torch

from pcp_kernels.reference import cache as cache_reference
from pcp_kernels.reference import pack, prep
from pcp_passes.errors import ConfigError
from pcp_passes.live_bytes import LiveBytes
from pcp_passes.sparse.backends import DEFAULT_WORKSPACE_BYTES
from pcp_passes.sparse.memory import PAGE, measure_index_step


def linear_bytes(rows: int, heads: int, dim: int, store: str) -> int:
    """Peak of preparing the queries of ``rows`` tokens, and packing and writing their keys; from bf16 projections."""
    q, w, k = (torch.randn(*shape).bfloat16() for shape in ((rows, heads, dim), (rows, heads), (rows, dim)))
    angles = torch.arange(rows)[:, None] / torch.logspace(0, 4, dim // 4)
    cos, sin = angles.cos(), angles.sin()
    width = dim + 4 if store == "fp8" else dim
    pages = -(-rows // PAGE)
    shape = (pages, PAGE * width) if store == "fp8" else (pages, PAGE, width)
    cache = torch.zeros(shape, dtype=pack.index_pack(k[:1], store=store).dtype)
    slots = torch.arange(rows)
    with LiveBytes() as live:
        prepared = prep.index_prep(q, w, cos, sin, rope="interleaved", store=store, factor=(heads * dim) ** -0.5)
        record = pack.index_pack(k, None, None, 0.0, cos, sin, rope="interleaved", store=store)
        cache_reference.scatter(cache, record, slots)
        del prepared
    return live.peak


def main(argv: list[str] | None = None) -> int:
    """Measure one step and print it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    for name, default in (("rows", 8192), ("keys", 32768), ("heads", 32), ("dim", 128), ("topk", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--measured", type=int, help="rows that select, the last ones; default all")
    parser.add_argument("--workspace-mib", type=float, default=DEFAULT_WORKSPACE_BYTES / 2**20)
    parser.add_argument("--store", default="fp8")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        found = measure_index_step(
            rows=given.rows, keys=given.keys, heads=given.heads, dim=given.dim, topk=given.topk, store=given.store,
            workspace_bytes=int(given.workspace_mib * 2**20), measured_rows=given.measured,
        )  # fmt: skip
    except ConfigError as error:
        parser.error(str(error))
    linear = linear_bytes(given.rows, given.heads, given.dim, given.store)
    step_scores = 4 * given.heads * given.rows * given.keys
    if given.json:
        print(json.dumps(found.to_json() | {"linear_bytes": linear, "unlowered_step_bytes": step_scores}))
    else:
        sizes = {
            "selection": (
                found.peak_bytes - found.output_bytes,
                f"of temporaries; budget {given.workspace_mib:.0f} MiB",
            ),
            "its result": (4 * given.rows * given.topk, "for all rows"),
            "linear parts": (linear, "at most: prepared queries, packed keys"),
            "unlowered": (step_scores, "of scores for this step (computed)"),
            "": (found.unlowered_bytes, "for the whole prompt at once (computed)"),
        }
        print(
            f"{given.rows} tokens on {given.keys} keys, {given.heads} heads, best {given.topk}, {given.store} keys; "
            f"{found.measured_rows} rows selected in {found.seconds:.0f} s"
        )
        print("\n".join(f"  {what:<12} {size / 2**20:>9.1f} MiB {note}" for what, (size, note) in sizes.items()))
    return int(given.check and not found.within)


if __name__ == "__main__":
    sys.exit(main())
