# SPDX-License-Identifier: Apache-2.0
"""Where vLLM hands over a whole Dynamo graph, and gets back one callable with two bodies.

Mode 2 calls :func:`inductor` or :func:`eager`; mode 3 goes through ``VllmBackend``, whose ``__call__`` is wrapped so
that the rewrite happens before the graph is split into pieces. In both, each body is compiled once from the same
capture, and the entry point picks one by what the batch manager planned. It never looks at a tensor to decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from pcp_passes.dumps import claim_folder, dump_folder
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.graphs import REPLICATED, late_capture, require_kept_inputs
from pcp_passes.frontends.vllm.runtime import Role, Runtime
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.options import PcpOptions
from pcp_passes.passes import Observer, PassContext, build_variants
from pcp_passes.passes.observers import DumpObserver, TimeObserver, VerifyObserver
from pcp_passes.report import build_report

logger = logging.getLogger(__name__)

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class BodyEntry:
    """The compiled model: calls the body that the current plan selected for its role."""

    def __init__(self, bodies: dict[str, Callable[..., Any]], runtime: Runtime, role: Role) -> None:
        self.bodies = bodies
        self.runtime = runtime
        self.role = role

    def __call__(self, *args: Any) -> Any:
        variant = self.runtime.variants[self.role]
        if self.runtime.ran is not None:
            self.runtime.ran.append((self.role, variant))
        try:
            return self.bodies[variant](*args)
        except RuntimeError as error:
            late = late_capture(error, self.role, variant)
            if late is None:
                raise
            raise late from error


def inductor(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Mode-2 backend: rewrite, then Inductor."""
    return _compile(gm, example_inputs, _compile_fx, _name())


def _compile_fx(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    runtime = runtimes.current()
    # vLLM hands these to the backend that it knows as "inductor".
    patches = dict(runtime.inductor_config) if runtime is not None else {}
    compiled: Any = compile_fx(gm, list(inputs), config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def eager(gm: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
    """Mode-2 backend: rewrite, then run the graph as it is."""
    return _compile(gm, example_inputs, lambda graph, inputs: graph.forward, _name())


def _name() -> str:
    """What reports and dumps call the graph that mode 2 captures: the target is ``model``."""
    runtime = runtimes.current()
    return "model" if runtime is None or runtime.role == "target" else runtime.role


def around_vllm_backend(
    original: Callable[..., Any], backend: Any, graph: fx.GraphModule, example_inputs: Sequence[Any]
) -> Any:
    """Mode 3: two ``VllmBackend`` calls, one per body, with cache folders of their own."""
    from vllm.compilation.backends import VllmBackend
    from vllm.compilation.partition_rules import should_split

    compilation, runtime = backend.vllm_config.compilation_config, runtimes.current()
    rewrites = runtime is not None and runtime.pcp > 1 and runtime.options.mode == "rewrite"
    captures = rewrites and compilation.cudagraph_mode.has_piecewise_cudagraphs()
    backends = iter((backend, None))

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if captures:
            require_kept_inputs(gm.graph, lambda node: should_split(node, compilation.splitting_ops), backend.prefix)
        instance = next(backends)
        if instance is None:  # a VllmBackend compiles one graph
            # vLLM 0.33 decides on AOT per instance; the twin must not differ.
            aot = getattr(backend.compiler_manager, "use_aot_compile", None)
            more = {} if aot is None else {"use_aot_compile": aot}
            prefix = f"{backend.prefix}{REPLICATED}"
            instance = VllmBackend(backend.vllm_config, prefix=prefix, is_encoder=backend.is_encoder, **more)
        compiled: Callable[..., Any] = original(instance, gm, inputs)
        if captures:
            assert runtime is not None
            pieces = [item for item in instance.piecewise_graphs if not item.is_splitting_graph]
            runtime.pieces[instance.prefix] = len(pieces)
        return compiled

    return _compile(graph, example_inputs, compiler, backend.prefix)


def _compile(gm: fx.GraphModule, inputs: Sequence[Any], compiler: Compiler, name: str) -> Callable[..., Any]:
    runtime = runtimes.current()
    if runtime is None or runtime.role == "alone" or (runtime.pcp == 1 and runtime.options.mode == "rewrite"):
        return compiler(gm, inputs)
    options = runtime.options
    # `check` on one rank verifies what two would run.
    context = PassContext(
        pcp=options.ranks or max(runtime.pcp, 2), axis=runtimes.AXIS, shared_cache_layers=runtime.shared_cache_layers
    )
    variants = build_variants(gm, context, _observers(options, name, runtime.rank), pack=options.gather.pack)
    runtime.reports[name] = build_report(variants["sharded"], context)
    runtime.agree(
        f"graph {name}",
        {variant: graph_fingerprint(body) for variant, body in variants.items()},
        {variant: print_graph(body) for variant, body in variants.items()},
    )
    if options.mode == "check":
        logger.info("pcp_passes: %s can be sharded over %d ranks; running it unsharded", name, context.pcp)
        return compiler(gm, inputs)
    return BodyEntry({variant: compiler(body, inputs) for variant, body in variants.items()}, runtime, runtime.role)


def _observers(options: PcpOptions, name: str, rank: int) -> list[Observer]:
    observers: list[Observer] = [TimeObserver()]
    if options.verify != "off":
        observers.append(VerifyObserver(options.verify))
    folder = dump_folder(options.dump)
    if folder is not None and rank == 0:  # the text is the same on every rank
        observers.append(DumpObserver(claim_folder(folder, name)))
    return observers
