# SPDX-License-Identifier: Apache-2.0
"""Time of one planning call against vLLM's ``PCPManager``, side by side in one process.

Ours: ``Batch(...)``, ``dispatch_tokens`` and ``build_layout``. vLLM's: ``_build_batch_layout`` and
``get_num_tokens_for_dispatch`` of a manager on the CPU without a process group, where its uploads are plain references.
Each round times both, back to back; a ratio is the two medians of one round, so a busy machine slows both. Before
timing, compat="vllm" must give vLLM's index vectors on the very batch that is timed.

    OMP_NUM_THREADS=1 python benchmarks/planner.py [--rounds 30] [--calls 5] [--pcp 8] [--json]

Without vllm installed only our own times are reported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pcp_passes.layout import Batch, Layout, build_layout, dispatch_tokens


def batches(seed: int = 0) -> dict[str, Batch]:
    """Two serving steps: 256 decodes, and 32 prefills of 64 to 2048 tokens among 224 decodes."""
    rng = np.random.default_rng(seed)
    context = rng.integers(1, 8192, 256).astype(np.int32)
    decodes = Batch(np.ones(256, dtype=np.int32), context, context)
    prefilling = np.zeros(256, dtype=np.bool_)
    prefilling[rng.choice(256, 32, replace=False)] = True
    lens = np.where(prefilling, rng.integers(64, 2049, 256), 1).astype(np.int32)
    computed = np.where(prefilling & (rng.random(256) < 0.5), 0, context).astype(np.int32)
    mixed = Batch(lens, computed, np.where(prefilling, computed + lens, computed).astype(np.int32))
    return {"256 decodes": decodes, "32 prefills + 224 decodes": mixed}


def plan_call(batch: Batch, pcp: int, decode: str, compat: str | None) -> Callable[[], Layout]:
    """One planning call as a front end makes it, from the scheduler's arrays."""

    def call() -> Layout:
        fresh = Batch(batch.num_scheduled, batch.num_computed, batch.prefill_len, batch.is_prefilling)
        padded = dispatch_tokens(fresh, pcp, decode=decode, compat=compat)
        return build_layout(fresh, pcp, decode=decode, compat=compat, padded_tokens=padded)

    return call


def vllm_call(batch: Batch, pcp: int, decode: str) -> Callable[[], Any] | None:
    """The same in vLLM, returning its manager; None when vllm is not installed."""
    if importlib.util.find_spec("vllm") is None:
        return None
    import torch
    from vllm.v1.worker.gpu.pcp_manager import PCPManager

    torch.set_num_threads(1)
    manager = PCPManager(pcp, 0, torch.device("cpu"), decode == "owner")
    starts = batch.query_start_loc.astype(np.int32)

    def call() -> Any:
        padded = manager.get_num_tokens_for_dispatch(batch.num_scheduled, batch.is_prefilling)
        manager._build_batch_layout(
            batch.num_scheduled, batch.num_computed, batch.is_prefilling, starts, padded_num_tokens=padded
        )
        return manager

    return call


def check_equal(ours: Layout, manager: Any) -> None:
    """Raise AssertionError unless a compat layout is the manager's own."""
    pairs = {
        "gather_index": (ours.gather_index, manager._padded_gather_idx),
        "write_mask": (ours.write_mask, manager._gathered_kv_write_mask),
        "restore_index": (ours.restore_index, manager._hidden_restore_idx),
    }
    for name, (found, expected) in pairs.items():
        assert np.array_equal(found, expected.numpy()), f"{name} differs from vLLM's; the times would not compare."


def median_call(call: Callable[[], object], calls: int) -> float:
    """Median seconds of ``calls`` calls."""
    times = []
    for _ in range(calls):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(
    ours: Callable[[], object], theirs: Callable[[], object] | None, rounds: int, calls: int
) -> dict[str, float | None]:
    """Microseconds per call and the ratio theirs / ours with its range over the rounds."""
    own, other = [], []
    for _ in range(rounds):
        own.append(median_call(ours, calls))
        if theirs is not None:
            other.append(median_call(theirs, calls))
    ratios = [b / a for a, b in zip(own, other, strict=False)]
    return {
        "ours_us": statistics.median(own) * 1e6,
        "vllm_us": statistics.median(other) * 1e6 if other else None,
        "ratio": statistics.median(ratios) if ratios else None,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
    }


def run(pcp: int, rounds: int, calls: int) -> list[dict[str, Any]]:
    """All cases: two batches, two decode modes, even chunks and vLLM's chunks."""
    results = []
    for name, batch in batches().items():
        for decode in ("owner", "replicate"):
            theirs = vllm_call(batch, pcp, decode)
            if theirs is not None:
                check_equal(plan_call(batch, pcp, decode, "vllm")(), theirs())
            for compat in (None, "vllm"):
                ours = plan_call(batch, pcp, decode, compat)
                ours()
                row = {"batch": name, "tokens": batch.num_tokens, "decode": decode, "layout": compat or "even chunks"}
                results.append({**row, "pcp": pcp, **measure(ours, theirs, rounds, calls)})
    return results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pcp", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    results = run(args.pcp, args.rounds, args.calls)
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        sys.stdout.write("\n")
        return 0
    for r in results:
        line = f"{r['batch']:<26} P={r['pcp']} {r['decode']:<9} {r['layout']:<11} {r['ours_us']:8.0f} us"
        if r["ratio"] is not None:
            line += f"   vLLM {r['vllm_us']:7.0f} us   {r['ratio']:5.1f}x  ({r['ratio_min']:.1f}-{r['ratio_max']:.1f})"
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
