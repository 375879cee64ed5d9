# SPDX-License-Identifier: Apache-2.0
"""Functions run on a worker to look at what vLLM compiled."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import torch


def pieces(worker: Any) -> list[dict[str, Any]]:
    """The pieces of every ``VllmBackend`` of this process: whether vLLM splits there, our ops in it, the row counts of
    its inputs, and the symbol by which vLLM picks a compiled range: the first integer among them."""
    from vllm.compilation.backends import VllmBackend

    found = []
    for backend in [o for o in gc.get_objects() if isinstance(o, VllmBackend) and o._called]:
        for item in backend.piecewise_graphs:
            nodes = item.graph.graph.nodes
            ops = [str(node.target) for node in nodes if node.op == "call_function"]
            found.append(
                {
                    "body": backend.prefix,
                    "split": item.is_splitting_graph,
                    "ours": sum("pcp." in op for op in ops),
                    "ops": len(ops),
                    "rows": sorted({_rows(node) for node in nodes if node.op == "placeholder"} - {""}),
                    "picked_by": next(iter(_integers(nodes)), ""),
                }
            )
    return found


def _rows(node: torch.fx.Node) -> str:
    value = node.meta.get("example_value")
    size = value.shape[0] if isinstance(value, torch.Tensor) and value.ndim else value
    return str(size) if isinstance(size, torch.SymInt) else ""


def _integers(nodes: Any) -> list[str]:
    values = (node.meta.get("example_value") for node in nodes if node.op == "placeholder")
    return [str(value) for value in values if isinstance(value, torch.SymInt)]


def compilations(worker: Any) -> dict[str, int]:
    """vLLM's own counters of graphs compiled and cache entries written."""
    from vllm.compilation.counter import compilation_counter

    return dataclasses.asdict(compilation_counter)


def variants_used(worker: Any) -> dict[str, int]:
    """How often each body ran since :func:`count_variants`."""
    from pcp_passes.frontends.vllm import runtime as runtimes

    counts: dict[str, int] = getattr(runtimes.current(), "_test_counts", {})
    return counts


def count_variants(worker: Any) -> None:
    """Begin to count the steps of each body."""
    from pcp_passes.frontends.vllm import runtime as runtimes

    runtime = runtimes.current()
    assert runtime is not None
    counts: dict[str, int] = {}
    runtime._test_counts = counts  # type: ignore[attr-defined]
    runtime.observers.append(lambda step: counts.update({step["variant"]: counts.get(step["variant"], 0) + 1}))


def last_sampled(worker: Any) -> list[list[int]]:
    """The token that each request slot sampled last, on this worker."""
    tokens: list[list[int]] = worker.model_runner.req_states.last_sampled_tokens.tolist()
    return tokens


def qualified(name: str) -> str:
    """The name by which a session calls one of these functions."""
    return f"{__name__}:{name}"
