# SPDX-License-Identifier: Apache-2.0
"""Run vLLM's Model Runner V2 on a machine without a GPU. For tests and demonstrations only.

vLLM refuses this combination: the runner wants Triton and CUDA streams. Nothing of its semantics depends on
either, so a few stand-ins suffice, applied in every process *before vLLM is imported*:

1. ``TRITON_INTERPRET=1``: the runner's input kernels run in Triton's interpreter. While vLLM probes Triton, a
   driver that reports itself active is present, and removed again afterwards.
2. ``torch.cuda`` streams and events become inert objects: CPU work is already in order.
3. Mode 3 (``VllmBackend``, the piecewise split) is kept when asked for. vLLM's CPU platform turns it into mode 2,
   and its post-grad passes name CUDA-only operators; the one that does is left out. So with asynchronous
   scheduling, which that platform switches off as not required.
4. Piecewise CUDA graphs, when asked for, are a check of what each would have read (:mod:`.cpu_graphs`).
5. Experts that are spread over ranks are dispatched, routed and combined over gloo (:mod:`.cpu_experts`).

It proves semantics. It does not prove kernels, races, NCCL or graph capture. Production never imports it.

Use :func:`enable` before importing vLLM; worker processes inherit it through the environment.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pcp_passes.frontends.vllm import cpu_experts, cpu_graphs
from pcp_passes.frontends.vllm.imports import after_import, around_import

SWITCH = "PCP_PASSES_CPU_RUNNER"
_installed = False
_SITE = Path(__file__).parent / "cpu_site"


def environment(*, cores: Sequence[int] = ()) -> dict[str, str]:
    """Environment variables that make a fresh process run the V2 runner on CPU.

    Args:
        cores: one core per rank; empty leaves thread binding to vLLM.
    """
    path = os.pathsep.join(p for p in (str(_SITE), os.environ.get("PYTHONPATH", "")) if p)
    env = {
        SWITCH: "1",
        "PYTHONPATH": path,
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if cores:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    return env


def enable(*, cores: Sequence[int] = ()) -> None:
    """Prepare this process and its children. Must run before the first ``import vllm``."""
    if "vllm" in sys.modules and not active():
        raise RuntimeError("vllm is already imported; call cpu_runner.enable() before importing it.")
    os.environ.update(environment(cores=cores))
    install()


def active() -> bool:
    """Whether the stand-ins are installed in this process."""
    return _installed


def install() -> None:
    """Put the import hooks in place (idempotent)."""
    global _installed
    if not _installed:
        around_import("vllm.triton_utils.importing", _triton_looks_active)
        after_import("vllm.platforms.cpu", _keep_mode_3)
        cpu_graphs.install()
        cpu_experts.install()
    _installed = True


@contextlib.contextmanager
def _triton_looks_active() -> Iterator[None]:
    from triton.backends import backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    _inert_cuda()
    backends["cpu"] = types.SimpleNamespace(driver=Driver, compiler=None)
    try:
        yield
    finally:
        backends.pop("cpu", None)


class _Inert:
    """A stream or event on a device that executes in order: every method does nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Inert:
        return self

    def __exit__(self, *exc: object) -> None:
        return None

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: object) -> float:
        return 0.0

    def record_event(self, *args: object) -> _Inert:
        return _Inert()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def _inert_cuda() -> None:
    import torch

    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Inert
    cuda.current_stream = lambda *args, **kwargs: _Inert()
    cuda.set_stream = cuda.synchronize = lambda *args, **kwargs: None
    cuda.stream = lambda stream: contextlib.nullcontext()


def _keep_mode_3(module: types.ModuleType) -> None:
    """Let ``CpuPlatform`` keep VLLM_COMPILE, and give it a pass manager whose passes exist on CPU."""
    platform = module.CpuPlatform
    original = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        from vllm.config import CompilationMode

        compilation = vllm_config.compilation_config
        asked, backend, sizes = compilation.mode, compilation.backend, compilation.cudagraph_capture_sizes
        asynchronous = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        if os.environ.get("PCP_PASSES_CPU_ASYNC"):
            vllm_config.scheduler_config.async_scheduling = asynchronous
        # Only an explicit mode 3 is kept: the platform's default stays what it is.
        if asked != CompilationMode.VLLM_COMPILE or not os.environ.get("PCP_PASSES_CPU_MODE_3"):
            return
        compilation.mode, compilation.backend = asked, backend
        compilation.compile_sizes = list(compilation.compile_sizes or ())
        compilation.cudagraph_capture_sizes = sizes if cpu_graphs.active() else []
        compilation.pass_config.fuse_norm_quant = False
        compilation.pass_config.fuse_act_quant = False

    platform.check_and_update_config = classmethod(check_and_update_config)
    platform.get_pass_manager_cls = classmethod(lambda cls: f"{__name__}.CpuPassManager")


def __getattr__(name: str) -> Any:
    """``CpuPassManager`` is built on first use: its base class lives in vLLM."""
    if name != "CpuPassManager":
        raise AttributeError(name)
    from vllm.compilation.passes import pass_manager as upstream

    class CpuPassManager(upstream.PostGradPassManager):  # type: ignore[misc]
        """vLLM's post-grad passes without the one that names CUDA-only operators."""

        def configure(self, config: Any) -> None:
            # `FixFunctionalizationPass.__init__` looks the operators up; an identity takes its place.
            original = upstream.FixFunctionalizationPass
            upstream.FixFunctionalizationPass = lambda config: _NoPass()
            try:
                super().configure(config)
            finally:
                upstream.FixFunctionalizationPass = original

    globals()[name] = CpuPassManager
    return CpuPassManager


class _NoPass:
    def __call__(self, graph: object) -> None:
        return None

    def uuid(self) -> str:
        return "no-pass"
