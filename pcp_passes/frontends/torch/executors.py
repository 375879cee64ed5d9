# SPDX-License-Identifier: Apache-2.0
"""Who runs a rewritten graph: one rank of a process group, or all ranks in this process.

A graph is prepared once (compiled, or taken as it is) and then run once a call with the plan of that call. Its text is
the same on all ranks; the rank is in the rows it is given.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
from torch import fx

from pcp_passes.collectives import CollectiveLog, bound_axis
from pcp_passes.distributed import require_agreement
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.frontends.torch.fresh import FreshSpace, compile_in
from pcp_passes.frontends.torch.options import Inner, TorchOptions
from pcp_passes.frontends.torch.plan import TokenPlan
from pcp_passes.passes.tokens.parts import split_parts
from pcp_passes.simulate import simulate

AXIS = "pcp"

Program = Callable[..., Any]
"""Called with T, M, the captured inputs, and the two plan inputs."""


class Executor(Protocol):
    """What a sharded graph needs to run."""

    @property
    def pcp(self) -> int:
        """P, the number of ranks."""
        ...

    @property
    def axis(self) -> str:
        """Name of the axis in the graph."""
        ...

    @property
    def rank(self) -> int:
        """The rank that this process is; 0 where it is all of them."""
        ...

    def agree(self, topic: str, facts: Mapping[str, str], texts: Mapping[str, str], timeout_s: float) -> None:
        """Return when all ranks are about to run the same graph; raise on every rank otherwise."""
        ...

    def prepare(self, space: FreshSpace, gm: fx.GraphModule) -> Program:
        """Make a rewritten graph ready to run."""
        ...

    def run(self, program: Program, arguments: Sequence[Any], plan: TokenPlan) -> Sequence[Any]:
        """Run it on the arguments of one call; the outputs, in the graph's order."""
        ...

    def local_rows(self, plan: TokenPlan) -> torch.Tensor:
        """i64[M], the global token of each row of this rank."""
        ...


@dataclass(frozen=True, eq=False)
class GroupExecutor:
    """This process is one rank of a process group.

    Attributes:
        group: its rank order is the order of the axis.
        inner: what runs the graph.
        axis: name of the axis, one for each group that lives in this process.
    """

    group: dist.ProcessGroup
    inner: Inner = "inductor"
    axis: str = AXIS

    @classmethod
    def of(cls, options: TorchOptions) -> GroupExecutor:
        """The executor that ``options`` ask for. Raises ConfigError when there is no such group."""
        group = find_group(options.group)
        default = group is dist.group.WORLD
        return cls(group, options.inner, options.axis or (AXIS if default else f"{AXIS}_{group.group_name}"))

    @property
    def pcp(self) -> int:
        """P, the size of the group."""
        return self.group.size()

    @property
    def rank(self) -> int:
        """This process's place in the group."""
        return self.group.rank()

    def agree(self, topic: str, facts: Mapping[str, str], texts: Mapping[str, str], timeout_s: float) -> None:
        """Compare through the store that the group was made with; a collective could hang."""
        if self.pcp == 1:
            return
        require_agreement(
            _store_of(self.group), rank=self.rank, world=self.pcp, topic=topic, facts=facts, texts=texts,
            timeout_s=timeout_s,
        )  # fmt: skip

    def prepare(self, space: FreshSpace, gm: fx.GraphModule) -> Program:
        """Compile the body with Inductor and run what is before and after it as it is; or run all of it as it is."""
        if self.inner != "inductor":
            return _without_sizes(gm.forward)
        parts = split_parts(gm)
        body = compile_in(space, parts.body)

        def program(num_tokens: int, num_rows: int, *arguments: Any) -> Sequence[Any]:
            return parts.run(arguments, functools.partial(body, num_tokens, num_rows))

        return program

    def run(self, program: Program, arguments: Sequence[Any], plan: TokenPlan) -> Sequence[Any]:
        """Run this rank's rows; collectives go over the group."""
        with bound_axis(self.axis, self.group), torch.no_grad():
            outputs: Sequence[Any] = program(
                plan.num_tokens, plan.num_rows, *arguments, self.local_rows(plan), plan.restore
            )
        return outputs

    def local_rows(self, plan: TokenPlan) -> torch.Tensor:
        """i64[M], the global token of each row of this rank."""
        return plan.rows[self.rank]


@dataclass(frozen=True, eq=False)
class SimulatedExecutor:
    """All ranks in this process, in lockstep. The graph is interpreted; nothing is compiled.

    Attributes:
        pcp: P.
        axis: name of the axis.
        logs: after a call, the collectives of each rank.
    """

    pcp: int
    axis: str = AXIS
    rank: int = 0
    logs: list[CollectiveLog] = field(default_factory=list)

    def agree(self, topic: str, facts: Mapping[str, str], texts: Mapping[str, str], timeout_s: float) -> None:
        """There is one graph only."""

    def prepare(self, space: FreshSpace, gm: fx.GraphModule) -> Program:
        """Interpret the graph on all ranks and return rank 0's outputs, which every rank must have."""

        def program(*arguments: Any) -> Sequence[Any]:
            _, _, *shared, rows, restore = arguments
            outputs = simulate(gm, [(*shared, local, restore) for local in rows], logs=self.logs)
            _require_equal_outputs(gm, outputs)
            first: Sequence[Any] = outputs[0]
            return first

        return program

    def run(self, program: Program, arguments: Sequence[Any], plan: TokenPlan) -> Sequence[Any]:
        """Run all ranks."""
        with torch.no_grad():
            outputs: Sequence[Any] = program(plan.num_tokens, plan.num_rows, *arguments, plan.rows, plan.restore)
        return outputs

    def local_rows(self, plan: TokenPlan) -> torch.Tensor:
        """i64[M], the rows of rank 0."""
        return plan.rows[0]


def _without_sizes(forward: Callable[..., Any]) -> Program:
    """The graph as it is reads its sizes from its inputs."""

    def program(num_tokens: int, num_rows: int, *arguments: Any) -> Any:
        return forward(*arguments)

    return program


def _require_equal_outputs(gm: fx.GraphModule, outputs: Sequence[Sequence[Any]]) -> None:
    names = [str(argument) for argument in next(iter(gm.graph.find_nodes(op="output"))).args[0]]
    for rank, own in enumerate(outputs[1:], start=1):
        for name, mine, first in zip(names, own, outputs[0], strict=True):
            same = mine == first if not isinstance(mine, torch.Tensor) else _equal(mine, first)
            if not same:
                raise PcpError(
                    f"output %{name} of rank {rank} differs from that of rank 0, but an output in global order is the "
                    "same on all ranks. Dump the graph (option dump) and look at the placement of this output."
                )


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    both_nan = (left != left) & (right != right)
    return bool(((left == right) | both_nan).all())


def find_group(wanted: Any) -> dist.ProcessGroup:
    """The process group that an option names.

    Args:
        wanted: ``None`` for the default group, a process group, a one-dimensional device mesh, or the name or
            description of a group of this process.

    Raises:
        ConfigError: torch.distributed is not initialised, or nothing is called that.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise ConfigError(
            "context parallelism over processes needs torch.distributed, which is not initialised. Call "
            "torch.distributed.init_process_group() first, or run all ranks in this process with "
            "pcp_passes.simulate_model(model, inputs, pcp=2)."
        )
    if wanted is None:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if isinstance(wanted, dist.ProcessGroup):
        return wanted
    if isinstance(wanted, str):
        return _group_called(wanted)
    if hasattr(wanted, "get_group") and getattr(wanted, "ndim", 0) == 1:
        found: dist.ProcessGroup = wanted.get_group()
        return found
    raise ConfigError(
        f"group is {wanted!r}; required a process group, a one-dimensional device mesh, or a group's name. Take one "
        'dimension of a larger mesh: mesh["pcp"].'
    )


# Private names below checked against torch 2.13.0: the registry of groups, and the store of a group.


def _group_called(name: str) -> dist.ProcessGroup:
    groups: list[dist.ProcessGroup] = list(_c10d._world.pg_map)
    for group in groups:
        if name in (group.group_name, group.group_desc):
            return group
    known = sorted({group.group_desc or group.group_name for group in groups})
    raise ConfigError(
        f"no process group is called {name!r}; this process has {', '.join(map(repr, known))}. "
        f"Make one with torch.distributed.new_group(ranks, group_desc={name!r})."
    )


def _store_of(group: dist.ProcessGroup) -> Any:
    ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
    return _c10d.PrefixStore(f"pcp_passes/{ranks}", _c10d._get_default_store())
