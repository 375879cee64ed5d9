# SPDX-License-Identifier: Apache-2.0
"""Times of the kernels that score and select, as speeds and as shares of what the card did in the same run."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pcp_kernels import catalog
from sparse_index.cases import Inputs
from sparse_index.problems import WORKSPACE, Problem, problem, select
from sparse_index.run import Run

PREFILL = ((2048, 8192), (2048, 32768), (2048, 65536), (4096, 32768), (4096, 131072))
"""Rows that end a request, and the request's keys."""
DECODE = (64, 65536)
"""Requests of one row, and keys of each."""


def ceilings(run: Run) -> dict[str, Any]:
    """TFLOP/s of a large product per dtype, GB/s of a copy; nothing in the interpreter."""
    if run.interpret:
        run.skipped.append("ceilings: speeds are not measured in the interpreter")
        return {}
    size = 8192
    found = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        a, b = (torch.randn(size, size, device=run.device).to(dtype) for _ in range(2))
        found[f"{name}_tflops"] = 2 * size**3 / run.seconds(lambda a=a, b=b: a @ b) / 1e12
    if run.fp8:
        a, b = (torch.randn(size, size, device=run.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=run.device)
        call = lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
        found["fp8_tflops"] = 2 * size**3 / run.seconds(call) / 1e12
    source = torch.empty(1 << 30, dtype=torch.uint8, device=run.device)
    target = torch.empty_like(source)
    found["copy_gbps"] = 2 * source.numel() / run.seconds(lambda: target.copy_(source)) / 1e9
    return found


def times(run: Run) -> list[dict[str, Any]]:
    """Logits, selection of these logits, fused and decode, for 32 and 64 heads, fp8 first."""
    rows: list[dict[str, Any]] = []
    for name in ("fp8",) if run.interpret else ("fp8", "bf16"):
        if name == "fp8" and not run.fp8:
            continue
        for heads in (4,) if run.interpret else (32, 64):
            for tokens, keys in ((9, 150),) if run.interpret else PREFILL:
                what = f"times {name} {heads} heads {tokens} x {keys}"
                if not run.late(what):
                    call = functools.partial(prefill_times, run, name, heads, tokens, keys)
                    rows += run.attempt(what, call) or []
            requests, keys = (3, 150) if run.interpret else DECODE
            what = f"times {name} {heads} heads decode {requests} x {keys}"
            if not run.late(what):
                rows += run.attempt(what, functools.partial(decode_time, run, name, heads, requests, keys)) or []
    return rows


def _problem(run: Run, name: str, heads: int, tokens: int, keys: int, requests: int) -> Problem:
    sizes = {"dim": 32, "page": 16} if run.interpret else {"dim": 128, "page": 64}
    here = torch.arange(tokens, device=run.device, dtype=torch.int32) % (tokens // requests)
    ke = keys - tokens // requests + 1 + here
    return problem(
        Inputs(run.device, tokens, keys), heads=heads, store=name, layout="paged", requests=requests, ke=ke, **sizes
    )


def prefill_times(run: Run, name: str, heads: int, tokens: int, keys: int) -> list[dict[str, Any]]:
    """A prefill step: ``tokens`` rows end a request of ``keys`` keys; as many launches as 512 MiB of logits take."""
    given = _problem(run, name, heads, tokens, keys, 1)
    topk, arch = (16, catalog.INTERPRETER) if run.interpret else (2048, _arch(run))
    dim, page = given.q.shape[2], given.page
    scorer = catalog.logits(heads=heads, arch=arch, dim=dim, store=name, page=page)
    columns = -(-keys // 16) * 16
    step = min(tokens, WORKSPACE // (4 * columns))
    scores = torch.empty(step, columns, device=run.device)
    parts = [given.part(first, step) for first in range(0, tokens, step)]
    units = 4 if run.interpret else torch.cuda.get_device_properties(run.device).multi_processor_count
    work = {
        "logits": lambda: [part.logits(scorer, scores[: part.q.shape[0]]) for part in parts],
        "selection": lambda: [
            select(catalog.select(topk, arch), scores[: part.q.shape[0]], part.ke, units) for part in parts
        ],
        "tiled": lambda: given.select(topk, "tiled"),
        "fused": lambda: given.select(topk, "fused"),
    }
    shape = {"store": name, "heads": heads, "rows": tokens, "keys": keys}
    flops, logits = 2 * heads * dim * given.pairs, 4 * given.pairs
    sizes = {"logits": (flops, 0), "selection": (0, logits), "tiled": (flops, 2 * logits), "fused": (flops, 0)}
    return [_row(run, {"what": what, **shape}, run.seconds(call), *sizes[what]) for what, call in work.items()]


def decode_time(run: Run, name: str, heads: int, requests: int, keys: int) -> list[dict[str, Any]]:
    """One row of each request over all of its keys, split and merged."""
    given = _problem(run, name, heads, requests, keys, requests)
    seconds = run.seconds(lambda: given.select(16 if run.interpret else 2048, "split"))
    per_key = given.keys.element_size() * given.keys.shape[2] + (4 if given.scale is not None else 0)
    shape = {"what": "decode", "store": name, "heads": heads, "rows": requests, "keys": keys}
    return [_row(run, shape, seconds, 2 * heads * given.q.shape[2] * given.pairs, given.pairs * per_key)]


def _arch(run: Run) -> int:
    major, minor = torch.cuda.get_device_capability(run.device)
    return 10 * major + minor


def _row(run: Run, shape: dict[str, Any], seconds: float | None, flops: float, moved: float) -> dict[str, Any]:
    """Speeds of a measurement and their share of what was measured as the ceiling; None without a measurement."""
    ceiling = run.results.get("ceilings", {})
    row: dict[str, Any] = {**shape, "ms": None if seconds is None else 1e3 * seconds}
    for label, amount, unit, limit in (
        ("tflops", flops, 1e12, f"{shape['store']}_tflops"),
        ("gbps", moved, 1e9, "copy_gbps"),
    ):
        if amount:
            speed = None if seconds is None else amount / seconds / unit
            row[label] = speed
            row[f"{label}_share"] = speed / ceiling[limit] if speed is not None and limit in ceiling else None
    return row
