# SPDX-License-Identifier: Apache-2.0
"""vLLM's piecewise CUDA graphs on a machine without a GPU, as a check. For tests only, beside :mod:`.cpu_runner`.

vLLM wraps every compiled piece in the platform's *static graph wrapper*, captures all sizes at start and replays from
then on; before that it captures them once to measure, on a small KV cache, and drops all of it. Here the wrapper is
:class:`~pcp_passes.frontends.vllm.replay_check.ReplayCheck`; vLLM's own captures, dispatch and padding run, and ours
with them. It proves which addresses and shapes a graph would see. It does not prove that a piece can be captured.
"""

from __future__ import annotations

import os
import types
from typing import Any

from pcp_passes.frontends.vllm.imports import after_import

SWITCH = "PCP_PASSES_CPU_GRAPHS"
WRAPPER = "pcp_passes.frontends.vllm.replay_check.ReplayCheck"


def install() -> None:
    """Let vLLM's CPU platform take ``cudagraph_mode="PIECEWISE"``. Called by :mod:`.cpu_runner` when asked."""
    after_import("vllm.platforms.cpu", _offer_graphs)
    after_import("vllm.v1.worker.cpu_worker", _capture_when_warm)


def active() -> bool:
    """Whether the environment asks for the check."""
    return bool(os.environ.get(SWITCH))


def _offer_graphs(module: types.ModuleType) -> None:
    platform = module.CpuPlatform
    platform.support_static_graph_mode = classmethod(lambda cls: active())
    platform.get_static_graph_wrapper_cls = classmethod(
        lambda cls: "pcp_passes.frontends.vllm.replay_check.ReplayCheck"
    )
    platform.graph_pool_handle = classmethod(lambda cls: (0, 0))


def _capture_when_warm(module: types.ModuleType) -> None:
    """vLLM's GPU worker captures twice: to measure, when it asks how much memory is left, and at the end of its
    warm-up. The CPU worker has no such calls."""
    worker = module.CPUWorker
    measure, warm_up = worker.determine_available_memory, worker.compile_or_warm_up_model

    def determine_available_memory(self: Any) -> Any:
        result = measure(self)
        if active():
            _stand_ins(self)
            self.model_runner.profile_cudagraph_memory()
        return result

    def compile_or_warm_up_model(self: Any) -> Any:
        result = warm_up(self)
        if active() and self.model_runner.needs_cudagraph_capture():
            self.model_runner.capture_model()
        return result

    worker.determine_available_memory = determine_available_memory
    worker.compile_or_warm_up_model = compile_or_warm_up_model


def _stand_ins(worker: Any) -> None:
    """What the capture asks of a device, the workspace that the GPU worker makes, and the wrappers that vLLM clears."""
    import torch
    from vllm.compilation.cuda_graph import CUDAGraphWrapper
    from vllm.v1.worker import workspace

    from pcp_passes.frontends.vllm.replay_check import ReplayCheck

    CUDAGraphWrapper._all_instances.update(ReplayCheck.instances)

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(worker.device)
    accelerator: Any = torch.accelerator
    accelerator.empty_cache = accelerator.synchronize = lambda *args, **kwargs: None
    accelerator.get_memory_info = lambda *args, **kwargs: (0, 0)
