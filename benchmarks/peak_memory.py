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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parent))
from scaling import VOCABULARY, Dense

MAX_SHARE = 0.45


class LiveBytes(TorchDispatchMode):
    """Adds up the storages that operations have made and something still holds."""

    def __init__(self, ignore: Any) -> None:
        super().__init__()
        self.ignored = {t.untyped_storage()._cdata for t in ignore}
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for held in tree_leaves(out):
            if isinstance(held, torch.Tensor):
                storage = held.untyped_storage()
                if storage._cdata not in self.ignored:
                    self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


def peak_bytes(model: Dense, tokens: int, pcp: int, rank: int) -> int:
    """Peak of one rank's prefill."""
    from pcp_passes.collectives import bound_axis
    from pcp_passes.frontends.torch.capture import DynamoGraph, capture
    from pcp_passes.frontends.torch.plan import build_plan
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
    parameters = [t for t in real if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
    with torch.no_grad(), bound_axis("pcp", lambda x: torch.cat([x] * pcp)), LiveBytes(parameters) as counted:
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
