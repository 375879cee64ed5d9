# SPDX-License-Identifier: Apache-2.0
"""Lay one scheduled batch out over four ranks and look at it: who holds what, and how the orders connect.

    python examples/plan_a_batch.py

Index arithmetic in numpy, all ranks at once; no process group, no GPU, no vLLM.
"""

import numpy as np

from pcp_passes.layout import Batch, build_layout, dispatch_tokens, sampled_rows

PCP = 4


def main() -> None:
    batch = Batch(
        num_scheduled=[37, 1, 3, 100],  # tokens of this step
        num_computed=[0, 80, 0, 64],  # tokens already in the cache
        prefill_len=[37, 80, 3, 164],  # so: a fresh prefill, a decode, a prefill shorter than P, a second chunk
    )
    layout = build_layout(batch, PCP)  # zigzag; decodes replicated
    print(f"{layout.num_tokens} tokens, {layout.padded_tokens} rows on each of {PCP} ranks")
    for rank in range(PCP):
        rows = layout.rows(rank)
        held = zip(rows.row_request, rows.row_start, rows.row_length, strict=True)
        spans = ", ".join(f"request {r}: {a}..{a + n - 1}" for r, a, n in held)
        print(f"  rank {rank}  {rows.num_tokens:2} real rows   {spans}")

    # Ranks size their step before they lay it out, in closed form; a graph bucket is chosen by this number.
    assert dispatch_tokens(batch, PCP) == layout.padded_tokens
    # Even chunks: the ranks differ by one row at most, so no rank pads more than one.
    assert np.ptp(layout.per_rank_tokens) <= 1

    # The two identities. Any tensor of token rows will do; here each row is its own number.
    tokens = np.arange(layout.num_tokens)
    rank_major = tokens[layout.gather_index]  # what an all-gather of every rank's rows gives
    assert np.array_equal(rank_major[layout.restore_index], tokens)
    # Each token is written to the cache once, however many ranks ran it; padded rows are never written.
    assert np.array_equal(np.sort(rank_major[layout.write_mask]), tokens)
    print(f"{PCP * layout.padded_tokens} gathered rows, {int(layout.write_mask.sum())} of them written")

    # Only the rows that are sampled leave in global order: the last token of each request.
    last = batch.query_start_loc[1:] - 1
    sampled = sampled_rows(layout, last)
    by_rank = rank_major.reshape(PCP, -1)
    gathered = np.concatenate([by_rank[rank][sampled.rows[rank]] for rank in range(PCP)])
    assert np.array_equal(gathered[sampled.restore], last)
    print(f"sampling gathers {gathered.size} rows instead of {rank_major.size}")

    decodes = Batch([1, 1], [80, 12], [80, 12])
    assert build_layout(decodes, PCP).is_replicated
    print("a pure decode step is replicated: the body without collectives runs")


if __name__ == "__main__":
    main()
