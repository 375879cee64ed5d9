# SPDX-License-Identifier: Apache-2.0
"""What executors of a step program share: bodies that write what the caches hold, their stages, and their graphs."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import fx

from pcp_passes.engine.executor import Executor, Rank
from pcp_passes.engine.expert_shards import expert_layers, shard_experts
from pcp_passes.engine.graphs import GraphPlanner
from pcp_passes.engine.options import CACHE_DTYPES, EngineOptions
from pcp_passes.engine.requirements import RECORDS, require_full_graphs, require_kernels
from pcp_passes.errors import ConfigError
from pcp_passes.mesh.combinations import require_allowed
from pcp_passes.step.placement import body_of
from pcp_passes.step.program import StepProgram

if TYPE_CHECKING:
    from pcp_passes.paged.routed import ExpertShard
    from pcp_passes.piecewise.compile import Backend
    from pcp_passes.piecewise.cuts import Collectives
    from pcp_passes.step.stages import StageProgram

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program as an engine runs it.

    ``program`` writes the records of its caches, and dispatches rows to experts of other ranks where they are sharded.
    ``stages`` are its pipeline stages: one for each of ``pp``, none for an engine of one rank per PCP place.
    """

    program: StepProgram
    stages: tuple[StageProgram, ...]


_PREPARED: WeakKeyDictionary[StepProgram, dict[tuple[object, ...], tuple[StepProgram | None, tuple[StageProgram, ...]]]]
_PREPARED = WeakKeyDictionary()
"""Replicas in one process, and engines one after another, share what was made of a program; None is the program itself,
which a value must not keep alive."""


def prepared(program: StepProgram, options: EngineOptions) -> Prepared:
    """``program`` for an engine of ``options``; made once.

    Raises:
        ConfigError: a mesh that the program cannot run on.
    """
    known = _PREPARED.setdefault(program, {})
    store = RECORDS[options.cache_dtype]
    key = (store, options.pp, options.dp if options.expert_parallel else 0, options.lockstep)
    if key not in known:
        made = program.storing(store)
        if options.expert_parallel:
            made = made.dispatching(options.dp)
        stages: tuple[StageProgram, ...] = ()
        if options.pp > 1 or options.lockstep:
            from pcp_passes.step.stages import split_program

            stages = split_program(made, options.pp)
        known[key] = (None if made is program else made, stages)
    changed, stages = known[key]
    return Prepared(changed or program, stages)


class ProgramExecutor(Executor):
    """Shared by all: the program, with bodies that write what the caches hold, its stages, and its graphs."""

    own_experts = False
    """Copy this rank's experts, so that those of the program may be freed; else they are views on them."""

    def __init__(
        self,
        program: StepProgram,
        options: EngineOptions,
        ranks: Sequence[int],
        device: torch.device | str,
        *,
        stages: Sequence[int] | None = None,
        replica: int = 0,
    ) -> None:
        if program.pcp != options.pcp:
            raise ConfigError(
                f"the step program was built for {program.pcp} pcp ranks and EngineOptions has pcp={options.pcp}; "
                "build both for one size."
            )
        if options.expert_parallel and not any(shard_experts(model, 0, 1) for model in _models(program)):
            require_allowed(options.mesh, frontend="embedded", expert_parallel=True, experts=0)
        made = prepared(program, options)
        program, self.stages = made.program, made.stages
        bodies = [body.graph for name, body in graphs_of(program) if "." in name]
        require_kernels(bodies, options, program.target.dtype, torch.device(device))
        require_full_graphs(bodies, options, program.drafter.steps, torch.device(device))
        dtype = CACHE_DTYPES[options.cache_dtype] or program.target.dtype
        super().__init__(
            options, program.drafter.steps, ranks, stages=stages, replica=replica, cache_dtype=dtype, device=device
        )
        self.program, self.vocab_size = program, program.target.vocab_size
        if options.expert_parallel:
            for rank in self.ranks:
                rank.memory.caches.experts = self._experts(rank)

    def _experts(self, rank: Rank) -> dict[str, ExpertShard]:
        """The share of a rank: of the layers of its stage, for its place in the flattened order (dp, pcp)."""
        place, size = self.replica * self.options.pcp + rank.index, self.options.dp * self.options.pcp
        shards: dict[str, ExpertShard] = {}
        for model in _models(self.program):
            layers = _experts_on(self.stages[rank.stage], model.name) if self.stages else None
            shards |= shard_experts(model, place, size, layers=layers, copy=self.own_experts and size > 1)
        return shards

    def _make_graphs(self) -> None:
        """A planner, and on every rank here a runner, when a graph mode is on."""
        options = self.options
        if self.buckets is None:
            return
        # Read when a graph mode asks for them: splitting runs passes, and compiling imports the compiler.
        from pcp_passes.piecewise.compile import PieceCompiler
        from pcp_passes.piecewise.prepare import prepare
        from pcp_passes.piecewise.runner import BodyRunner

        calls = [body_of(node) for node in self.program.plain.graph.nodes if str(node.target).startswith("drafter.")]
        draft_calls = sum(call is not None for call in calls) > 1
        planner = GraphPlanner(options, self.steps, self.buckets, draft_calls=draft_calls)
        if planner.why_nothing:
            logger.warning("graphs: graph_mode=%r captures nothing: %s", options.graph_mode, planner.why_nothing)
        collectives, backend = cast("Collectives", options.graph_collectives), cast("Backend", options.graph_compile)
        self.compiler = PieceCompiler(backend)
        prepared = prepare(self.program, collectives=collectives, compiler=self.compiler)
        for rank in self.ranks:
            caches = rank.memory.caches
            caches.runner = BodyRunner(
                prepared, caches, rows_max=planner.max_rows, requests_max=planner.max_requests,
                columns=options.blocks_per_request(self.steps), max_bytes=options.graph_bytes,
            )  # fmt: skip
        self.planner = planner


def graphs_of(program: StepProgram) -> Iterator[tuple[str, fx.GraphModule]]:
    """Every graph of a program by name: its own, and the bodies."""
    yield "plain", program.plain
    if program.sharded is not None:
        yield "sharded", program.sharded
    for model in _models(program):
        for variant, body in model.bodies.items():
            yield f"{model.name}.{variant}", body


def _experts_on(stage: StageProgram, name: str) -> list[str]:
    """Layers of the model ``name`` whose experts a stage reads."""
    drafter = None if stage.drafter is None else stage.drafter.model
    held = [model for model in (stage.target, drafter) if model is not None and model.name == name]
    return list(
        dict.fromkeys(layer for model in held for body in model.bodies.values() for layer in expert_layers(body))
    )


def _models(program: StepProgram) -> Iterator[Any]:
    yield program.target
    if program.drafter.model is not None:
        yield program.drafter.model
