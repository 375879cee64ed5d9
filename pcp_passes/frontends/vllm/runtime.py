# SPDX-License-Identifier: Apache-2.0
"""What one vLLM worker knows about prefill context parallelism: options, rank, and the current bodies.

The passes never see this. It is the only place where a rank meets the compiled bodies: the batch manager sets
``variants`` before a model is entered, and the entry point of the compiled model reads its own entry. Target and
drafter have one each: a drafter runs its first pass on the target's rows and its later steps replicated, within one
step of the target.
"""

from __future__ import annotations

import functools
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from pcp_passes.collectives import bind_axis
from pcp_passes.distributed import Heartbeat, open_store, require_agreement
from pcp_passes.distributed.store import Store
from pcp_passes.errors import ConfigError
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
    from vllm.distributed.parallel_state import get_pcp_group

    group = get_pcp_group()
    asked = vllm_config.parallel_config.prefill_context_parallel_size
    if group.world_size != asked:
        raise ConfigError(
            f"the PCP group has {group.world_size} ranks but prefill_context_parallel_size is {asked}; "
            "start as many workers as TP x PP x PCP asks for."
        )
    runtime = Runtime(
        options=options,
        pcp=group.world_size,
        rank=group.rank_in_group,
        inductor_config=dict(vllm_config.compilation_config.inductor_compile_config),
    )
    _current = runtime
    if group.world_size == 1:
        return runtime
    # On CPU, vLLM's expert layers are traced down to their collectives. As operations of vLLM's they end before they
    # return; as PyTorch's functional ones, Inductor (2.13) lets the router read a gathered buffer before it is awaited.
    group.use_custom_op_call = True
    bind_axis(AXIS, lambda rows: group.all_gather(rows, dim=0))
    _watch(runtime, group)
    return runtime


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


def _address_of_first_rank(runtime: Runtime, bootstrap: Store, name: str) -> str:
    """Where the group's store is served: on its rank 0, which need not be the machine of the world's rank 0."""
    from vllm.utils.network_utils import get_ip

    key, machine = f"pcp_passes/{name}/address", socket.gethostname()
    if runtime.rank == 0:
        bootstrap.set(key, f"{machine} {get_ip()}")
        return "127.0.0.1"
    bootstrap.wait([key], timedelta(seconds=runtime.options.agreement_s))
    where, address = bootstrap.get(key).decode().split()
    return "127.0.0.1" if where == machine else address


def _watch(runtime: Runtime, group: Any) -> None:
    import torch
    import vllm

    bootstrap = dist.distributed_c10d._get_default_store()
    name = f"{group.unique_name}/{group.ranks}"
    connect = functools.partial(
        open_store,
        _address_of_first_rank(runtime, bootstrap, name),
        rank=runtime.rank,
        world=runtime.pcp,
        bootstrap=bootstrap,
        timeout_s=runtime.options.agreement_s,
    )
    runtime.store = connect(name=f"{name}/agreement")
    runtime.heartbeat = Heartbeat(
        connect(name=f"{name}/heartbeat"), rank=runtime.rank, world=runtime.pcp, silence_s=runtime.options.silence_s
    )
    runtime.heartbeat.start()
    runtime.agree(
        "options",
        {
            "options": runtime.options.digest(),
            "build": build_id(runtime.options, runtime.pcp),
            "torch": torch.__version__,
            "vllm": vllm.__version__,
        },
    )
    logger.info("pcp_passes: rank %d of %d ready, options %s", runtime.rank, runtime.pcp, runtime.options)
