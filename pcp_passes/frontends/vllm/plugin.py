# SPDX-License-Identifier: Apache-2.0
"""The ``vllm.general_plugins`` entry point.

vLLM calls :func:`register` in every process. It installs hooks that do nothing unless
``additional_config["pcp_passes"]`` asks for us: where the configuration is made, where the engine starts its workers,
and where a worker starts. Everything else (:func:`activate`) is installed by the last, in workers that need it.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import config as vllm_options
from pcp_passes.frontends.vllm import placement
from pcp_passes.frontends.vllm.config_graphs import asks_for_sizes
from pcp_passes.frontends.vllm.executor import around_init_executor
from pcp_passes.frontends.vllm.imports import after_import
from pcp_passes.frontends.vllm.mla_cpu import keep_chunked_prefill
from pcp_passes.frontends.vllm.sparse import install as sparse
from pcp_passes.options import PcpOptions

logger = logging.getLogger(__name__)

#: Attention back ends whose decoder path reads keys and values from the paged cache alone, with per-row lengths.
#: That is all PCP needs of a dense back end; vLLM marks them unsupported because no model gathered for them.
_PAGED_IMPLS: dict[str, str] = {
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl": "executed on CPU",
    "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl": "read only",
    "vllm.v1.attention.backends.triton_attn.TritonAttentionImpl": "read only",
}


def register() -> None:
    """Install the hooks (idempotent: vLLM may load plugins several times in one process).

    It imports nothing of vLLM: some processes that load plugins need none of these modules.
    """
    after_import("vllm.platforms.cpu", keep_chunked_prefill)
    after_import("vllm.platforms.cpu", sparse.offer_backend)
    after_import("vllm.v1.metrics.prometheus", _hook_registry)
    after_import("vllm.engine.arg_utils", _hook_engine_arguments)
    after_import("vllm.v1.worker.worker_base", _hook_workers)
    after_import("vllm.v1.executor.multiproc_executor", _hook_executor)
    after_import(placement.MODULE, placement.count_pcp)
    after_import("vllm.v1.engine.core", _hook_engine)
    after_import("vllm.v1.core.sched.scheduler", _hook_scheduler)


def _hook_engine_arguments(module: ModuleType) -> None:
    wrap(module.EngineArgs, "create_engine_config", _around_create_engine_config)
    log_as_vllm_does()


def _hook_registry(module: Any) -> None:
    from pcp_passes.frontends.vllm import metrics

    if not hasattr(module.get_prometheus_registry, "__wrapped__"):
        module.get_prometheus_registry = metrics.around_registry(module.get_prometheus_registry)


def _hook_executor(module: ModuleType) -> None:
    wrap(module.MultiprocExecutor, "_init_executor", around_init_executor)


def _hook_engine(module: ModuleType) -> None:
    from pcp_passes.frontends.vllm import pipeline

    wrap(module.EngineCore, "post_step", pipeline.around_post_step)


def _hook_scheduler(module: ModuleType) -> None:
    from pcp_passes.frontends.vllm import pipeline

    wrap(module.Scheduler, "update_from_output", pipeline.around_update_from_output)


def _hook_workers(module: ModuleType) -> None:
    wrap(module.WorkerWrapperBase, "init_device", _around_init_device)
    wrap(module.WorkerWrapperBase, "shutdown", _around_shutdown)
    log_as_vllm_does()


def log_as_vllm_does() -> None:
    """Give this package's loggers vLLM's level and handlers: vLLM configures its own alone, so ours would be silent.

    Where the user has set up logging, for this package or for all, that stays.
    """
    ours, theirs = logging.getLogger("pcp_passes"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        ours.handlers = list(theirs.handlers)
        ours.propagate = False  # a root handler that is added later would say everything twice
        ours.setLevel(theirs.level)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ``around`` in front of a method, once: it is called with the original, the object and the arguments."""
    original = getattr(owner, name)
    if hasattr(original, "__pcp_passes_original__"):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, self, *args, **kwargs)

    wrapper.__pcp_passes_original__ = original  # type: ignore[attr-defined]
    setattr(owner, name, wrapper)


def _around_create_engine_config(original: Callable[..., Any], args: Any, *rest: Any, **kwargs: Any) -> Any:
    options = vllm_options.prepare(args)
    sizes_asked = options is not None and asks_for_sizes(args)
    vllm_config = original(args, *rest, **kwargs)
    if options is not None:
        from pcp_passes.frontends.vllm import metrics

        vllm_options.validate(vllm_config, options, sizes_asked=sizes_asked)
        metrics.publish()
    return vllm_config


def _around_init_device(original: Callable[..., Any], worker: Any) -> Any:
    options = vllm_options.options_of(worker.vllm_config.additional_config)
    if options is not None:
        activate(options)
        sparse.replace_layer(worker.vllm_config)
    result = original(worker)
    if options is not None:
        from pcp_passes.frontends.vllm import metrics

        metrics.count_after_warm_up(worker.worker)
    return result


def _around_shutdown(original: Callable[..., Any], worker: Any) -> Any:
    module = sys.modules.get("pcp_passes.frontends.vllm.runtime")  # not there when the plugin is off
    if module is not None:
        module.stop()
    return original(worker)


def activate(options: PcpOptions) -> None:
    """Install the worker-side hooks: backend, batch manager, attention back ends."""
    import vllm
    from vllm.compilation.backends import VllmBackend
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
    from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator
    from vllm.v1.worker.gpu_worker import Worker

    from pcp_passes.frontends.vllm import backend, drafting, dspark, graphs, kv_transfer, metrics, pipeline, versions

    versions.require_signatures(vllm.__version__)
    wrap(TargetDependentARSpeculator, "_run_model", drafting.around_draft_forward)
    wrap(DFlashSpeculator, "_run_model", dspark.around_block_forward)
    wrap(Worker, "execute_model", pipeline.around_execute_model)
    wrap(GPUModelRunner, "sample_tokens", pipeline.around_sample_tokens)
    wrap(AsyncOutput, "get_output", metrics.around_get_output)
    wrap(ActiveKVConnector, "pre_forward", kv_transfer.around_pre_forward)
    wrap(VllmBackend, "__call__", backend.around_vllm_backend)
    wrap(GPUModelRunner, "__init__", _around_runner_init)
    wrap(GPUModelRunner, "load_model", _around_load_model)
    _ship_rounds()
    if options.mode != "rewrite":
        return
    _accept_paged_backends()
    wrap(GPUModelRunner, "sample", drafting.around_sample)
    wrap(TargetDependentARSpeculator, "propose", drafting.around_propose)
    wrap(DFlashSpeculator, "propose", drafting.around_block_propose)
    wrap(GPUModelRunner, "capture_model", graphs.around_capture_model)
    wrap(ModelCudaGraphManager, "capture", graphs.around_target_capture)
    wrap(SpeculatorCudaGraphManager, "capture", graphs.around_draft_capture)
    if not isinstance(vars(GPUModelRunner)["pcp_manager_cls"], _ManagerClass):
        GPUModelRunner.pcp_manager_cls = _ManagerClass(vars(GPUModelRunner)["pcp_manager_cls"])


def _ship_rounds() -> None:
    """Where there are no streams, our rounds take the place of vLLM's broadcasts between stages. They fit the form that
    these have in 0.32; vLLM 0.33 keeps its own."""
    import vllm
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu import model_runner

    original = model_runner.PPHandler
    known = vllm.__version__.startswith("0.32") and isinstance(original, type)
    if not current_platform.is_cpu() or not known:
        return

    def handler(*args: Any, **kwargs: Any) -> Any:
        from pcp_passes.frontends.vllm import rounds, runtime

        return (original if runtime.current() is None else rounds.RoundHandler)(*args, **kwargs)

    model_runner.PPHandler = handler


class _ManagerClass(property):
    """``GPUModelRunner.pcp_manager_cls``, vLLM's extension point for the class of batch manager."""

    def __init__(self, original: property) -> None:
        super().__init__(lambda runner: _manager_class(runner, original))


def _manager_class(runner: Any, original: property) -> type:
    from pcp_passes.frontends.vllm import runtime
    from pcp_passes.frontends.vllm.manager import PassesPCPManager

    current = runtime.current()
    if current is None or current.pcp == 1:
        assert original.fget is not None
        return original.fget(runner)  # type: ignore[no-any-return]
    return PassesPCPManager.bound(runner, current)


def _accept_paged_backends() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    for qualname in _PAGED_IMPLS:
        try:
            resolve_obj_by_qualname(qualname).supports_pcp = True
        except ImportError as missing:  # a back end of another platform
            logger.debug("pcp_passes: %s is not here (%s)", qualname, missing)


def _around_runner_init(original: Callable[..., Any], runner: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    """The process groups exist, and nothing of the model yet: vLLM 0.33 asks for the manager's class in here."""
    from pcp_passes.frontends.vllm import runtime

    options = vllm_options.options_of(vllm_config.additional_config)
    if options is None:  # a second engine in this process, which asks for nothing
        runtime.forget()
    else:
        runtime.start(options, vllm_config)
    return original(runner, vllm_config, *args, **kwargs)


def _around_load_model(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    from pcp_passes.frontends.vllm import drafting, pipeline, runtime

    current = runtime.current()
    rewrites = current is not None and (current.pcp > 1 or current.options.mode == "check")
    if rewrites:
        drafting.compile_draft_class(runner.vllm_config)
    with nullcontext() if current is None else pipeline.draft_embedding_watched(runner.vllm_config):
        result = original(runner, *args, **kwargs)
    if rewrites:
        drafting.require_compiled(runner)
    if current is not None:
        layers = runner.vllm_config.compilation_config.static_forward_context
        sharing = (name for name, layer in layers.items() if getattr(layer, "kv_sharing_target_layer_name", None))
        current.shared_cache_layers = frozenset(sharing)
        if current.pcp > 1 and current.options.mode == "rewrite":
            _own_the_gather(runner.vllm_config)
    return result


def _own_the_gather(vllm_config: Any) -> None:
    """Turn vLLM's own latent gather off (it would gather what is gathered already) and refuse cache kinds that
    hold per-request state instead of rows."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    layers = vllm_config.compilation_config.static_forward_context
    stateful = []
    for name, layer in layers.items():
        if getattr(layer, "use_pcp", False):
            layer.use_pcp = False
        spec = layer.get_kv_cache_spec(vllm_config) if hasattr(layer, "get_kv_cache_spec") else None
        if spec is not None and not isinstance(spec, AttentionSpec):
            stateful.append(f"{name} ({type(spec).__name__})")
    if stateful:
        raise ConfigError(
            "these layers keep a recurrent state, which cannot be split over tokens: "
            f"{', '.join(stateful[:8])}{', ...' if len(stateful) > 8 else ''}; run this model without PCP."
        )
