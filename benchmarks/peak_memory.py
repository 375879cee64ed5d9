# SPDX-License-Identifier: Apache-2.0
"""Peak bytes of live activations of one rank, at P = 1 and at P = 4, for a long prefill.

Each rank's graph is run for real, its operations watched by a dispatch mode that adds up the storages which are alive;
parameters are left out. The output is the last token's logits, as at serving. Gathers return rows of the right number
without other ranks: their values do not matter here, their size does.

    python benchmarks/peak_memory.py [--tokens 8192] [--pcp 4] [--json] [--check]

``--check`` exits with 1 when the largest rank holds more than 0.45 of what one rank alone does.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import fx

sys.path.insert(0, str(Path(__file__).parent))
from scaling import VOCABULARY, Dense

MAX_SHARE = 0.45


def peak_bytes(model: Dense, tokens: int, pcp: int, rank: int) -> int:
    """Peak of one rank's prefill."""
    from pcp_passes.collectives import bound_axis
    from pcp_passes.frontends.torch.capture import DynamoGraph, capture
    from pcp_passes.frontends.torch.plan import build_plan
    from pcp_passes.live_bytes import LiveBytes
    from pcp_passes.passes import PassContext
    from pcp_passes.passes.tokens.pipeline import TokenOptions, rewrite_tokens

    held: list[Any] = []

    def keep(gm: fx.GraphModule, inputs: Any) -> Any:
        graph = DynamoGraph.read(gm)

        def run(*arguments: Any) -> Any:
            held.append((graph, arguments))
            return gm.forward(*arguments)

        return run

    torch._dynamo.reset()
    short = torch.randint(0, VOCABULARY, (1, 64))
    torch._dynamo.mark_dynamic(short, 1)
    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(short)
    graph, arguments = held[0]
    captured = capture(graph, arguments, rows=max(2, 64 // pcp))
    options = TokenOptions(outputs="last")
    gm = rewrite_tokens(captured.gm, captured.space, PassContext(pcp), options=options).gm
    plan = build_plan(tokens, pcp, "zigzag")
    ids = torch.randint(0, VOCABULARY, (1, tokens))
    real = [_at_length(given, tokens, ids) for given in arguments]
    inputs = [*real, plan.rows[rank], plan.restore]
    with torch.no_grad(), bound_axis("pcp", lambda x: torch.cat([x] * pcp)), LiveBytes() as counted:
        fx.Interpreter(gm, garbage_collect_values=True).run(*inputs)
    return counted.peak


def _at_length(given: Any, tokens: int, ids: torch.Tensor) -> Any:
    if isinstance(given, torch.Tensor):
        return ids if not given.dtype.is_floating_point else given
    return tokens


def main(argv: list[str] | None = None) -> int:
    """Measure both and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--pcp", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Dense().eval().requires_grad_(False)
    alone = peak_bytes(model, arguments.tokens, 1, 0)
    ranks = [peak_bytes(model, arguments.tokens, arguments.pcp, rank) for rank in range(arguments.pcp)]
    share = max(ranks) / alone
    if arguments.json:
        print(json.dumps({"tokens": arguments.tokens, "alone": alone, "ranks": ranks, "share": share}))
    else:
        print(f"{arguments.tokens} tokens: one rank {alone / 2**20:.1f} MiB, the largest of {arguments.pcp} "
              f"{max(ranks) / 2**20:.1f} MiB: {share:.2f} (at most {MAX_SHARE})")  # fmt: skip
    return int(arguments.check and share > MAX_SHARE)


if __name__ == "__main__":
    sys.exit(main())
