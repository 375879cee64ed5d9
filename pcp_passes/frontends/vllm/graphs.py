# SPDX-License-Identifier: Apache-2.0
"""Piecewise CUDA graphs with two bodies per model: both are captured before the first request, each on the buffers
that its real steps read.

vLLM captures what a dummy batch runs. Under PCP that is the sharded body, on the batch manager's rank-local buffers;
the replicated body, which reads the runner's own, would be captured in the middle of a request, whose answer would be
what lies in uninitialised memory (nothing runs during a capture). So every capture is done twice:

===========  ==============================  =============================================================
body         ids, positions, lengths         block tables and slots
===========  ==============================  =============================================================
sharded      the manager's rank-local ones   the manager's, slots of ``P * M`` gathered rows
replicated   target: the runner's;           the runner's, slots of ``M`` rows
             drafter: its own
===========  ==============================  =============================================================

The size of a sharded step is its *rank-local* padded rows, the same on all ranks; that of a replicated step its tokens.
Both come from ``PassesPCPManager.get_num_tokens_for_dispatch``. A replicated step holds decoding requests only, so its
body is captured up to the size that holds them all, the sharded one for every size. After the capture, capturing is
switched off: a size that was missed is an error then, not an answer. A drafter's passes after its first are not
captured (vLLM captures those as whole graphs only).
"""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.frontends.vllm.config_graphs import most_replicated_rows, up_to
from pcp_passes.frontends.vllm.runtime import Role, Runtime, Variant

if TYPE_CHECKING:
    import torch
    import torch.fx as fx

    from pcp_passes.frontends.vllm.manager import PassesPCPManager

logger = logging.getLogger(__name__)

#: Ends vLLM's name of a replicated body; the sharded one has the model's.
REPLICATED = "_replicated"


def around_capture_model(original: Callable[..., int], runner: Any, *args: Any, **kwargs: Any) -> int:
    """Wraps ``GPUModelRunner.capture_model``: the only time at which a graph may be captured. vLLM profiles by a
    capture of its own before, and drops what that captured. A runner without PCP is left alone."""
    manager = _ours(runner.pcp_manager)
    if manager is None:
        return original(runner, *args, **kwargs)
    from vllm.compilation.monitor import set_cudagraph_capturing_enabled

    if manager.runtime.pieces and manager.runtime.rank == 0 and not kwargs.get("profile_only"):
        _say_what_is_captured(runner.vllm_config, manager.runtime)
    set_cudagraph_capturing_enabled(True)
    try:
        return original(runner, *args, **kwargs)
    finally:
        set_cudagraph_capturing_enabled(False)


def around_target_capture(original: Callable[..., None], graphs: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``ModelCudaGraphManager.capture``: once for each body."""
    given = inspect.signature(original).bind(graphs, *args, **kwargs)
    manager = _ours(given.arguments.get("pcp_manager"))
    if manager is None:
        return original(graphs, *args, **kwargs)
    original(graphs, *args, **kwargs)  # the manager's dummy batch enters the sharded body
    if not _has_replicated_steps(manager.runtime):
        return None
    # As without PCP.
    given.arguments |= {"pcp_manager": None, "input_buffers": manager.runner.input_buffers}
    with _entering(manager.runtime, "target", "replicated"), _as_many_as_decode(graphs):
        original(*given.args, **given.kwargs)
    return None


def around_draft_capture(original: Callable[..., None], graphs: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps ``SpeculatorCudaGraphManager.capture``: the first pass, once for each body. vLLM gives its dummy batches no
    batch manager, so a sharded one would read the drafter's buffers and write as many slots as it has rows."""
    given = inspect.signature(original).bind(graphs, *args, **kwargs)
    forward = given.arguments["forward_fn"]
    speculator = getattr(forward, "__self__", None)
    manager = _ours(getattr(speculator, "pcp_manager", None))
    if manager is None or getattr(speculator, "prefill_cudagraph_manager", None) is not graphs:
        return original(graphs, *args, **kwargs)
    runtime = manager.runtime

    def entering(variant: Variant) -> Callable[..., None]:
        def enter(*inputs: Any, **more: Any) -> None:
            with _entering(runtime, "drafter", variant):  # a pass ends by choosing the body of the next
                forward(*inputs, **more)

        return enter

    arguments = dict(given.arguments)
    sharded = {
        "forward_fn": entering("sharded"),
        "input_buffers": manager.input_buffers,
        "block_tables": _Dummies(manager),
    }
    given.arguments |= sharded
    original(*given.args, **given.kwargs)
    if _has_replicated_steps(runtime):
        given.arguments |= arguments | {"forward_fn": entering("replicated")}
        with _as_many_as_decode(graphs):
            original(*given.args, **given.kwargs)
    return None


def captured_sizes(config: Any, runtime: Runtime) -> dict[Variant, list[int]]:
    """Rows of the graphs of either body, rising; none where no step enters it."""
    sizes = sorted(config.compilation_config.cudagraph_capture_sizes)
    replicated = up_to(sizes, most_replicated_rows(config)) if _has_replicated_steps(runtime) else []
    return {"sharded": sizes, "replicated": replicated}


def count_graphs(config: Any, runtime: Runtime) -> int:
    """How many graphs a rank captures: one for each piece of each body and each size."""
    sizes = captured_sizes(config, runtime)
    return sum(count * len(sizes[_variant(body)]) for body, count in runtime.pieces.items())


def _say_what_is_captured(config: Any, runtime: Runtime) -> None:
    pieces: dict[Variant, int] = {"sharded": 0, "replicated": 0}
    for body, count in runtime.pieces.items():
        pieces[_variant(body)] += count
    bodies = [
        f"{len(rows)} sizes up to {rows[-1]} rows x {pieces[variant]} pieces of {variant} bodies"
        for variant, rows in captured_sizes(config, runtime).items()
        if rows
    ]
    logger.info(
        "pcp_passes: capturing %d CUDA graphs: %s; fewer with a smaller max_cudagraph_capture_size",
        count_graphs(config, runtime),
        ", ".join(bodies),
    )


def _variant(body: str) -> Variant:
    return "replicated" if body.endswith(REPLICATED) else "sharded"


def late_capture(error: RuntimeError, role: Role, variant: Variant) -> PcpError | None:
    """What to say of vLLM's refusal to capture in the middle of a request, which names neither body nor size; ``None``
    for any other error."""
    if "capturing detected at an inappropriate time" not in str(error):
        return None
    from vllm.forward_context import get_forward_context

    rows = get_forward_context().batch_descriptor.num_tokens
    return PcpError(
        f"the {variant} body of the {role} has no captured CUDA graph of {rows} rows, which this step needs, and "
        "nothing is captured after the start; set cudagraph_mode to NONE, and report this batch."
    )


def require_kept_inputs(graph: fx.Graph, splits: Callable[[fx.Node], bool], body: str) -> None:
    """Refuse a body of which a captured piece would read what an op between the pieces has just allocated: that lies
    elsewhere in every step, and a graph goes on reading where it lay at its capture. Without a word: vLLM compares
    addresses at log level DEBUG only.

    What a cache write or an attention op leaves behind it leaves in buffers that it was given; views of gathered rows
    are taken between the pieces, as the gather is.

    Args:
        graph: the rewritten body, before vLLM cuts it.
        splits: whether vLLM cuts at an op.
        body: its name, for the error.

    Raises:
        ConfigError: naming every such op and what it reads.
    """
    allocated: set[fx.Node] = set()
    offenders = []
    for node in graph.nodes:
        read = [given for given in node.all_input_nodes if given in allocated]
        if node.target is operator.getitem or (splits(node) and _is_view(node)):
            allocated.update([node] if read else [])
        elif splits(node):
            allocated.add(node)
        elif node.op != "output":
            offenders += [f"{node.name} reads {given.name}" for given in read]
    if offenders:
        raise ConfigError(
            f"cudagraph_mode=PIECEWISE would capture pieces of {body} that read what is allocated anew in every step ("
            f"{', '.join(offenders[:8])}{', ...' if len(offenders) > 8 else ''}); set cudagraph_mode to NONE."
        )


def _is_view(node: fx.Node) -> bool:
    """Whether an op returns part of its operand's memory. Dynamo's graphs hold packets of overloads too."""
    target: Any = node.target
    overload = target if hasattr(target, "_schema") else getattr(target, target.overloads()[0])
    returns = overload._schema.returns
    return bool(returns) and all(value.alias_info is not None for value in returns)


class _Dummies:
    """What a capture asks of block tables, answered for gathered rows."""

    cp_size = 1

    def __init__(self, manager: PassesPCPManager) -> None:
        self._manager = manager

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        return self._manager.get_dummy_block_tables(num_reqs)  # type: ignore[no-any-return]

    def get_dummy_slot_mappings(self, num_tokens: int) -> torch.Tensor:
        return self._manager.get_dummy_slot_mappings(num_tokens)


def _ours(manager: Any) -> PassesPCPManager | None:
    from pcp_passes.frontends.vllm.manager import PassesPCPManager

    return manager if isinstance(manager, PassesPCPManager) and runtimes.current() is not None else None


@contextmanager
def _as_many_as_decode(graphs: Any) -> Iterator[None]:
    """A capture in here stops at the size that holds every replicated step; what is dispatched to stays."""
    before = graphs._capture_descs
    sizes = up_to(
        {desc.num_tokens for descs in before.values() for desc in descs}, most_replicated_rows(graphs.vllm_config)
    )
    graphs._capture_descs = {mode: [d for d in descs if d.num_tokens in sizes] for mode, descs in before.items()}
    try:
        yield
    finally:
        graphs._capture_descs = before


def _has_replicated_steps(runtime: Runtime) -> bool:
    return runtime.options.decode == "replicate"


@contextmanager
def _entering(runtime: Runtime, role: Role, variant: Variant) -> Iterator[None]:
    """The next forwards of ``role`` enter ``variant``."""
    before, runtime.variants[role] = runtime.variants[role], variant
    try:
        yield
    finally:
        runtime.variants[role] = before
