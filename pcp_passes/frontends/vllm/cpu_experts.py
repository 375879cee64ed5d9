# SPDX-License-Identifier: Apache-2.0
"""What vLLM's expert layers lack on a CPU, once their experts are spread over ranks. For tests and demonstrations only.

CUDA has all four; here they are missing or wrong in vLLM 0.32 and 0.33:

1. ``CpuCommunicator`` has no ``all_gatherv`` and no ``reduce_scatterv``, so nothing dispatches and nothing combines.
   :func:`gather_rows` and :func:`reduce_rows` do both over gloo. The sum is taken in rank order by everyone: in a
   replicated step the PCP ranks hold copies of the same rows, which must come out equal to the last bit.
2. The layer is called as plain Python where CUDA calls an opaque op, so Dynamo traces through the dispatch and keeps
   the row counts of the step that it saw. Layers that dispatch become the opaque op (:func:`_opaque`).
3. ``CPUUnquantizedExperts`` reads its local weights at global expert numbers, past their end
   (:func:`local_experts`).
4. The routers' mask for padded rows lives in their CUDA kernels. The mask is the rank's own, before the dispatch
   (:func:`unroute_padding`).

:func:`install` puts the hooks in place. Engines without spread experts meet the third alone, which leaves routes to
local experts as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from pcp_passes.collectives_ragged import in_rank_order, padded, unpadded
from pcp_passes.frontends.vllm.imports import after_import

_MISSING = ("all_gatherv", "reduce_scatterv", "dispatch")


def install() -> None:
    """Repair each module when vLLM imports it (idempotent)."""
    after_import("vllm.distributed.device_communicators.cpu_communicator", _repair_communicator)
    after_import("vllm.model_executor.layers.fused_moe.runner.moe_runner", _repair_runner)
    after_import("vllm.model_executor.layers.fused_moe.experts.cpu_moe", _repair_experts)


def gather_rows(rows: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Rows of all ranks of ``group`` in rank order, ``[sum(sizes), ...]``; rank ``r`` gives ``sizes[r]`` rows.

    gloo gathers equal shapes only, so every rank sends the largest number of rows.
    """
    mine = sizes[group.rank()]
    assert rows.shape[0] == mine, f"{rows.shape[0]} rows where the ranks agreed on {mine} of {list(sizes)}"
    sent = padded(rows.contiguous(), max(sizes))
    received = [torch.empty_like(sent) for _ in sizes]
    dist.all_gather(received, sent, group=group)
    return unpadded(torch.cat(received), sizes)


def reduce_rows(rows: torch.Tensor, sizes: Sequence[int], rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's ``sizes[rank]`` rows of the sum over the group, from ``[sum(sizes), ...]`` of every rank.

    Each rank receives its rows from all and adds them in rank order, so that equal rows have equal sums wherever they
    are; the order of a ring would depend on the place.
    """
    received = rows.new_empty((sizes[rank] * len(sizes), *rows.shape[1:]))
    mine = [sizes[rank]] * len(sizes)
    dist.all_to_all_single(received, rows.contiguous(), mine, list(sizes), group=group)
    return in_rank_order(received.unflatten(0, (len(sizes), sizes[rank])).unbind())


def local_experts(
    weights: torch.Tensor, experts: torch.Tensor, expert_map: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes as the local kernel needs them: an expert that lives elsewhere, or -1 (not routed), weighs nothing.

    Args:
        weights: f32[N, K].
        experts: i32[N, K], global numbers or -1.
        expert_map: i32[E], the local number of each global one or -1; ``None`` when all are here.
    """
    if expert_map is None:
        local = experts
    else:
        local = expert_map.to(experts.dtype)[experts.clamp(min=0).long()].where(experts >= 0, -1)
    return torch.where(local >= 0, weights, 0), local.clamp(min=0)


def unroute_padding(
    weights: torch.Tensor, experts: torch.Tensor, padding: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes with every padded row's experts at -1. ``padding`` bool[>= N]; ``None`` when no row is padded."""
    if padding is None:
        return weights, experts
    rows = padding[: experts.shape[0], None]
    return weights.masked_fill(rows, 0), experts.masked_fill(rows, -1)


def _repair_communicator(module: ModuleType) -> None:
    communicator: Any = vars(module)["CpuCommunicator"]
    if "all_gatherv" in vars(communicator):  # repaired already, or a vLLM that can
        return

    def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        assert dim == 0, f"rows are gathered along dim 0, not {dim}"
        if isinstance(input_, list | tuple):
            return [all_gatherv(self, part, dim, sizes) for part in input_]
        return gather_rows(input_, sizes or [input_.shape[0]] * self.world_size, self.device_group)

    def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        assert dim % input_.dim() == 0, f"rows are reduced along dim 0, not {dim}"
        equal = [input_.shape[0] // self.world_size] * self.world_size
        return reduce_rows(input_, sizes or equal, self.rank_in_group, self.device_group)

    send = communicator.dispatch

    @functools.wraps(send)
    def dispatch(self: Any, hidden_states: Any, topk_weights: Any, topk_ids: Any, *args: Any, **kwargs: Any) -> Any:
        padding = _padding(hidden_states.shape[0])
        return send(self, hidden_states, *unroute_padding(topk_weights, topk_ids, padding), *args, **kwargs)

    communicator.all_gatherv, communicator.reduce_scatterv = all_gatherv, reduce_scatterv
    communicator.dispatch = dispatch


def _padding(rows: int) -> torch.Tensor | None:
    """The mask of this rank's own rows; ``None`` where PCP ranks' rows have been put together already (no EP)."""
    from vllm.forward_context import get_forward_context, is_forward_context_available

    padding = get_forward_context().is_padding if is_forward_context_available() else None
    return padding if padding is not None and padding.shape[0] == rows else None


def _repair_runner(module: ModuleType) -> None:
    runner: Any = vars(module)["MoERunner"]
    if hasattr(runner._select_forward, "__wrapped__"):
        return
    select = runner._select_forward

    @functools.wraps(select)
    def _select_forward(self: Any) -> Any:
        return _opaque(self) or select(self)

    runner._select_forward = _select_forward


def _opaque(runner: Any) -> Any:
    """vLLM's op for the whole layer, when its experts are spread over ranks by a dispatch; else ``None``."""
    parallel = runner.moe_config.moe_parallel_config
    if not parallel.use_all2all_kernels and parallel.dp_size == 1:
        return None
    shared = runner._shared_experts is not None
    return torch.ops.vllm.moe_forward_shared if shared else torch.ops.vllm.moe_forward


def _repair_experts(module: ModuleType) -> None:
    experts: Any = vars(module)["CPUUnquantizedExperts"]
    if hasattr(experts.apply, "__wrapped__"):
        return
    compute = experts.apply

    @functools.wraps(compute)
    def apply(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **rest: Any) -> Any:
        topk_weights, topk_ids = local_experts(topk_weights, topk_ids, expert_map)
        return compute(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **rest)

    experts.apply = apply
