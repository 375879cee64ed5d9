# SPDX-License-Identifier: Apache-2.0
"""What one vLLM worker knows about prefill context parallelism: options, rank, and the current bodies.

The passes never see this. It is the only place where a rank meets the compiled bodies: the batch manager sets
``variants`` before a model is entered, and the entry point of the compiled model reads its own entry. Target and
drafter have one each: a drafter runs its first pass on the target's rows and its later steps replicated, within one
step of the target.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from pcp_passes.collectives import bind_axis
from pcp_passes.distributed import Heartbeat, open_store, require_agreement
from pcp_passes.distributed.store import Store, TCPStore
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm.config_parallel import mesh_of
from pcp_passes.mesh.axes import Mesh
from pcp_passes.options import PcpOptions
from pcp_passes.passes import PassContext, body_pipeline
from pcp_passes.report import RewriteReport

logger = logging.getLogger(__name__)

AXIS = "pcp"
Variant = Literal["sharded", "replicated"]
#: Whose forward runs. ``alone`` is a drafter that is no part of the PCP program: its graph is left as it is.
Role = Literal["target", "drafter", "alone"]


@dataclass
class Runtime:
    """State of one worker process.

    Attributes:
        pcp: size of the PCP group.
        rank: this worker's rank in it.
        stages: pipeline stages.
        answers: whether the engine waits for what this worker returns; it asks one only.
        name: this worker's place in the mesh, for messages.
        variants: per role, the body that its next forward enters. ``sharded`` until a plan says otherwise, so that
            profile and warm-up runs, which no manager prepares, issue the same collectives on every rank.
        role: whose forward is running; a graph captured meanwhile belongs to it.
        observers: called with a plain description of each planned step.
        ran: when a list, every body that ran is appended to it: role and variant.
        reports: what was rewritten, per captured model.
        inductor_config: vLLM's ``inductor_compile_config``, for the mode-2 backend.
        shared_cache_layers: attention layers that read another layer's cache, and so write none.
        pieces: with piecewise CUDA graphs, how many pieces of each body are captured, by vLLM's name of the body.
    """

    options: PcpOptions
    pcp: int
    rank: int
    stages: int = 1
    answers: bool = True
    name: str = "this rank"
    variants: dict[Role, Variant] = field(default_factory=lambda: {"target": "sharded", "drafter": "sharded"})
    role: Role = "target"
    store: Store | None = None
    heartbeat: Heartbeat | None = None
    observers: list[Callable[[dict[str, Any]], None]] = field(default_factory=list)
    ran: list[tuple[Role, Variant]] | None = None
    reports: dict[str, RewriteReport] = field(default_factory=dict)
    shared_cache_layers: frozenset[str] = frozenset()
    inductor_config: dict[str, Any] = field(default_factory=dict)
    pieces: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def playing(self, role: Role) -> Iterator[None]:
        """Around a forward of ``role``."""
        before, self.role = self.role, role
        try:
            yield
        finally:
            self.role = before

    def agree(self, topic: str, facts: dict[str, str], texts: dict[str, str] | None = None) -> None:
        """Compare ``facts`` with the other ranks of the PCP group, through the store and with a timeout."""
        if self.store is None:
            return
        require_agreement(
            self.store,
            rank=self.rank,
            world=self.pcp,
            topic=topic,
            facts=facts,
            texts=texts or {},
            timeout_s=self.options.agreement_s,
        )


_current: Runtime | None = None


def current() -> Runtime | None:
    """The runtime of this process; ``None`` outside workers and when the plugin is off."""
    return _current


def start(options: PcpOptions, vllm_config: Any) -> Runtime:
    """Bind the PCP group and compare the ranks' options. Needs vLLM's process groups; before weights are loaded, so
    that ranks meet while they are close together in time.

    Raises:
        ConfigError: when the group does not have the configured size.
        RankMismatch: when the ranks were started with different options.
    """
    global _current
    from vllm.distributed.parallel_state import get_pcp_group, get_pp_group, get_tp_group

    group = get_pcp_group()
    asked = vllm_config.parallel_config.prefill_context_parallel_size
    if group.world_size != asked:
        raise ConfigError(
            f"the PCP group has {group.world_size} ranks but prefill_context_parallel_size is {asked}; "
            "start as many workers as TP x PP x PCP asks for."
        )
    stages = get_pp_group()
    runtime = Runtime(
        options=options,
        pcp=group.world_size,
        rank=group.rank_in_group,
        stages=stages.world_size,
        answers=stages.is_last_rank and group.rank_in_group == 0 and get_tp_group().rank_in_group == 0,
        inductor_config=dict(vllm_config.compilation_config.inductor_compile_config),
    )
    _current = runtime
    if group.world_size == stages.world_size == 1:
        return runtime
    if group.world_size > 1:
        _bind(group)
    _watch(runtime, group, mesh_of(vllm_config))
    return runtime


def _bind(group: Any) -> None:
    # On CPU, vLLM's expert layers are traced down to their collectives. As operations of vLLM's they end before they
    # return; as PyTorch's functional ones, Inductor (2.13) lets the router read a gathered buffer before it is awaited.
    group.use_custom_op_call = True
    bind_axis(AXIS, lambda rows: group.all_gather(rows, dim=0))


def forget() -> None:
    """Stop, and let the hooks that stay in this process find no runtime (idempotent)."""
    global _current
    stop()
    _current = None


def stop() -> None:
    """Say goodbye to the other ranks, so that they do not miss this one (idempotent)."""
    if _current is not None and _current.heartbeat is not None:
        _current.heartbeat.stop(linger_s=1.0)
        _current.heartbeat = None


def build_id(options: PcpOptions, pcp: int) -> str:
    """Hash of everything that decides the rewritten graphs: sources, passes, options, sizes, versions."""
    context = PassContext(pcp=pcp, axis=AXIS)
    return body_pipeline(pack=options.gather.pack).uuid(context, options.layout, asdict(options))


def _address_of_first_rank(rank: int, bootstrap: Store, name: str, timeout_s: float) -> str:
    """Where the group's store is served: on its rank 0, which need not be the machine of the world's rank 0."""
    from vllm.utils.network_utils import get_ip

    key, machine = f"pcp_passes/{name}/address", socket.gethostname()
    if rank == 0:
        bootstrap.set(key, f"{machine} {get_ip()}")
        return "127.0.0.1"
    bootstrap.wait([key], timedelta(seconds=timeout_s))
    where, address = bootstrap.get(key).decode().split()
    return "127.0.0.1" if where == machine else address


def _watch(runtime: Runtime, group: Any, mesh: Mesh) -> None:
    """Ranks of a PCP group compare graphs. All ranks that wait for each other anywhere compare options and listen for
    each other's heartbeat: the stages of an engine, and with experts the replicas in lockstep, which is what vLLM puts
    into one world."""
    import torch
    import vllm

    bootstrap = dist.distributed_c10d._get_default_store()
    timeout_s = runtime.options.agreement_s

    def connect(rank: int, world: int, name: str, purpose: str) -> TCPStore:
        address = _address_of_first_rank(rank, bootstrap, name, timeout_s)
        name = f"{name}/{purpose}"
        return open_store(address, rank=rank, world=world, bootstrap=bootstrap, timeout_s=timeout_s, name=name)

    if runtime.pcp > 1:
        name = f"{group.unique_name}/{group.ranks}"
        runtime.store = connect(runtime.rank, runtime.pcp, name, "agreement")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = mesh if mesh.world_size == world else replace(mesh, dp=max(world // mesh.engine_size, 1))
    runtime.name = f"rank {rank} ({mesh.coordinates(rank)})"
    runtime.heartbeat = Heartbeat(
        connect(rank, world, "world", "heartbeat"),
        rank=rank,
        world=world,
        silence_s=runtime.options.silence_s,
        name_of=lambda other: f"pcp rank {other}" if mesh.pcp == world else f"rank {other} ({mesh.coordinates(other)})",
    )
    runtime.heartbeat.start()
    require_agreement(
        connect(rank, world, "world", "options"),
        rank=rank,
        world=world,
        topic="options",
        facts={
            "options": runtime.options.digest(),
            "build": build_id(runtime.options, runtime.pcp),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
        },
        texts={},
        timeout_s=timeout_s,
    )
    logger.info("pcp_passes: %s ready, PCP rank %d, options %s", runtime.name, runtime.rank, runtime.options)
