# SPDX-License-Identifier: Apache-2.0
"""Devices of vLLM's data-parallel children, prefill-context ranks counted.

``vllm serve --data-parallel-multi-port-external-lb`` starts a child process for each local replica and gives it a
range of devices by ``dp_supervisor._build_device_ids``. vLLM 0.32 and 0.33 make that range ``TP * PP`` long: with PCP
the ranges of two children overlap in the workers, and each child has too few. Here it is ``TP * PP * PCP`` long.
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

MODULE = "vllm.entrypoints.launchers.dp_supervisor"

DeviceIds = Callable[[argparse.Namespace, int], list[Any]]


def count_pcp(module: ModuleType) -> None:
    """Correct ``module``, which is ``dp_supervisor``, in place; nothing when it counts PCP itself, or already does.

    It is called when vLLM imports the module, whether or not anyone asks for this package: what is not as expected is
    left alone. An engine that does ask is refused later, by its version.
    """
    original: DeviceIds | None = getattr(module, "_build_device_ids", None)
    if original is None or hasattr(original, "__pcp_passes_original__"):
        return
    try:
        forgets = forgets_pcp(original)
    except Exception as unknown:
        logger.info("pcp_passes: %s gives devices in a way that is not known here (%r)", MODULE, unknown)
        return
    if forgets:
        module._build_device_ids = around_device_ids(original)  # type: ignore[attr-defined]


def forgets_pcp(build: DeviceIds) -> bool:
    """Whether ``build`` gives the second of two replicas with 2 PCP ranks the devices of the first.

    Asked of the function, not of a version: a release that counts PCP must not have it counted twice.
    """
    asked = argparse.Namespace(
        tensor_parallel_size=1, pipeline_parallel_size=1, prefill_context_parallel_size=2, device_ids=None
    )
    return list(build(asked, 1)) != [2, 3]


def around_device_ids(original: DeviceIds) -> DeviceIds:
    """``_build_device_ids`` of engines that ask for this package, for ``TP * PP * PCP`` devices each."""

    def build(args: argparse.Namespace, local_rank: int) -> list[Any]:
        from pcp_passes.frontends.vllm.config import options_of  # which reads the refusal below

        pcp = getattr(args, "prefill_context_parallel_size", 1)
        if pcp == 1 or options_of(getattr(args, "additional_config", None)) is None:
            return original(args, local_rank)
        counted = copy.copy(args)
        counted.tensor_parallel_size = args.tensor_parallel_size * pcp
        return original(counted, local_rank)

    build.__pcp_passes_original__ = original  # type: ignore[attr-defined]
    return build


def device_affinity(config: Any) -> str | None:
    """Why a ``VllmConfig`` that binds workers to NUMA nodes or network cards cannot run; ``None`` when it can.

    vLLM finds the device of a later replica's worker for this (``numa_utils._get_gpu_index``,
    ``vllm_net_devices._dp_adjusted_local_rank``) by ``TP * PP``, where the worker itself counts PCP.
    """
    parallel = config.parallel_config
    if parallel.data_parallel_size == 1 or parallel.prefill_context_parallel_size == 1:
        return None
    if parallel.distributed_executor_backend in ("ray", "external_launcher") or parallel.data_parallel_backend == "ray":
        return None  # each worker sees its own device there
    found = []
    if parallel.numa_bind:
        found.append("numa_bind=true (NUMA nodes)")
    if os.environ.get("VLLM_GPU_NIC_PCIE_MAPPING", "").strip():
        found.append("VLLM_GPU_NIC_PCIE_MAPPING (network cards)")
    if not found:
        return None
    return (
        f"{' and '.join(found)} with data_parallel_size={parallel.data_parallel_size} would bind workers of later "
        "replicas by the devices of others, as vLLM leaves PCP out there; drop it, or start each replica on its own."
    )
