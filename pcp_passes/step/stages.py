# SPDX-License-Identifier: Apache-2.0
"""A step program cut into pipeline stages.

::

    first, last = split_program(program, pp=2)
    wires = first.run(state, inputs, plan)                      # on a rank of the first stage
    outputs = last.run(state, inputs, plan, wires)              # on the rank of the last that has the same rows

All stages run a step on the same :class:`StepInputs` and plan. A stage that is not the last gathers block tables, runs
its layers and gives the rows of its rank (:class:`Wire`); the last one does the rest: head, verification, drafter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from pcp_passes.collectives import CollectiveLog
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.ir import rules
from pcp_passes.ir.copies import copy_graph
from pcp_passes.ir.printer import graph_fingerprint
from pcp_passes.passes.base import PassContext, Variant
from pcp_passes.passes.bodies.split_stages import BodyStage, split_body
from pcp_passes.passes.bodies.stage_cut import Wire, decoder_layers, even_layers, require_layers
from pcp_passes.passes.pipeline import Observer
from pcp_passes.passes.steps.keep_stage import KeepStage, stage_pipeline
from pcp_passes.simulate import simulate_segments
from pcp_passes.speculative.contract import BodyModel, Drafter
from pcp_passes.step.calls import BodyCall
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs
from pcp_passes.step.program import RankState, StepProgram, chosen_program, program_values

__all__ = ["StageProgram", "Wire", "split_program"]

Groups = Mapping[str, Sequence[Sequence[int]]]


class StageProgram:
    """One stage of a step program; :func:`split_program` makes them.

    Attributes:
        index, count: which stage, of how many.
        pcp, axis, steps: as of the program; ``steps`` is K, also on stages without the drafter.
        plain, sharded: as of the program, with the wires of earlier stages as inputs behind all others.
        wires_in, wires_out: what the stage takes, and what it gives to the next.
        target: the model with this stage's bodies and cache layers; its head is on the last stage only.
        drafter: on the last stage, else ``None``.
        layers: decoder layers of each stage.
        cache_layers: names of the cache layers that live on this stage, the drafter's included.
        shared_weights: parameters of the drafter that are those of an earlier stage (see :func:`split_program`).
    """

    def __init__(
        self,
        program: StepProgram,
        index: int,
        layers: tuple[int, ...],
        bodies: Mapping[str, Sequence[BodyStage]],
        observers: Sequence[Observer] = (),
    ) -> None:
        self.index, self.count, self.layers = index, len(layers), layers
        self.pcp, self.axis, self.steps = program.pcp, program.axis, program.steps
        own = bodies["replicated"]
        self.wires_in, self.wires_out = _between(own, index), _between(own, index + 1)
        self.drafter: Drafter | None = program.drafter if self.is_last else None
        self.target = _target(program.target, {name: parts[index].gm for name, parts in bodies.items()}, self.is_last)
        self.shared_weights: tuple[str, ...] = ()
        keep = KeepStage(
            self.wires_in, tuple(wire.name for wire in own[index].takes), tuple(wire.name for wire in own[index].gives),
            self.wires_out,
        )  # fmt: skip

        def kept(gm: fx.GraphModule, variant: Variant) -> fx.GraphModule:
            graph, held = copy_graph(gm), _root(gm, self.target)
            graph.owning_module = held  # type: ignore[assignment]
            stage_pipeline(keep, observers).run_graph(graph, PassContext(self.pcp, self.axis, variant))
            return fx.GraphModule(held, graph, class_name="StageProgram")  # holds what the graph calls

        self.plain = kept(program.plain, "replicated")
        self.sharded = None if program.sharded is None else kept(program.sharded, "sharded")

    @property
    def is_first(self) -> bool:
        """Whether it starts from token ids alone."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it samples and drafts."""
        return self.index == self.count - 1

    @property
    def cache_layers(self) -> tuple[str, ...]:
        """Names of the cache layers that live on this stage."""
        model = self.drafter.model if self.drafter is not None else None
        return (*self.target.layers, *(model.layers if model is not None else ()))

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the stage's programs and bodies: equal on all ranks of the stage."""
        digest = hashlib.sha256(f"{self.index}/{self.count}".encode())
        for program in (self.plain, self.sharded):
            digest.update(b"" if program is None else graph_fingerprint(program).encode())
        for model in (self.target, self.drafter.model if self.drafter is not None else None):
            for variant, body in sorted(model.bodies.items()) if model is not None else ():
                digest.update(f"{variant}:{graph_fingerprint(body)}".encode())
        return digest.hexdigest()

    def run(
        self,
        state: RankState,
        inputs: StepInputs,
        plan: StepPlanInputs | None = None,
        wires: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, ...] | StepOutputs:
        """Run the stage of one step on this rank; collectives go over the group bound to the axis.

        Args:
            state, inputs, plan: as of :meth:`StepProgram.run`; equal on all stages but for the caches.
            wires: what the stage before gave, in its order.

        Returns:
            the wires for the next stage, or on the last one what the step gives.

        Raises:
            ConfigError: a plan for a program of one rank, or wires that are not those of ``wires_in``.
        """
        with torch.no_grad():
            program = chosen_program(self.plain, self.sharded, plan)
            return self._results(program(*self._values(state, inputs, plan, wires)), state)

    def simulate(
        self,
        states: Sequence[RankState],
        inputs: Sequence[StepInputs],
        plans: Sequence[StepPlanInputs] | None = None,
        wires: Sequence[Sequence[torch.Tensor]] | None = None,
        *,
        groups: Groups | None = None,
        logs: list[CollectiveLog] | None = None,
    ) -> list[tuple[torch.Tensor, ...]] | list[StepOutputs]:
        """Run the stage on all its ranks in this process, in lockstep.

        Args:
            states, inputs, plans, wires: one per rank of the stage.
            groups: which ranks meet, by axis; one group of all by default.
            logs: filled with the collectives of each rank.

        Raises:
            RankMismatch: ranks diverge.
            ConfigError: counts that differ, or wires that are not those of ``wires_in``.
        """
        count = len(states)
        given = wires if wires is not None else [()] * count
        each = plans if plans is not None else [None] * count
        if not count == len(inputs) == len(each) == len(given) or count % self.pcp:
            raise ConfigError(
                f"found {count} states, {len(inputs)} inputs, {len(each)} plans and {len(given)} sets of wires; "
                f"required one of each per rank, a multiple of pcp={self.pcp}"
            )
        values = [self._values(s, i, p, w) for s, i, p, w in zip(states, inputs, each, given, strict=True)]
        more: dict[str, Any] = {} if groups is None else {"groups": groups}
        with torch.no_grad():
            found = simulate_segments(chosen_program(self.plain, self.sharded, each[0]), values, logs=logs, **more)
        return [self._results(results, state) for results, state in zip(found, states, strict=True)]  # type: ignore[return-value]

    def _values(
        self, state: RankState, inputs: StepInputs, plan: StepPlanInputs | None, wires: Sequence[torch.Tensor]
    ) -> tuple[Any, ...]:
        rows = (inputs.input_ids if plan is None else plan.local_rows).shape[0]
        found = [f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" for x in wires]
        wanted = [f"{str(w.dtype).removeprefix('torch.')}{[rows, *w.shape]}" for w in self.wires_in]
        if found != wanted:
            raise ConfigError(
                f"stage {self.index} of {self.count} got wires {', '.join(found) or 'none'}; required "
                f"{', '.join(wanted) or 'none'} ({', '.join(w.name for w in self.wires_in)}): the rows of this rank, "
                "from the rank of the stage before that has the same plan"
            )
        return (*program_values(state, inputs, plan), *wires)

    def _results(self, found: Any, state: RankState) -> tuple[torch.Tensor, ...] | StepOutputs:
        if self.is_last:
            return StepOutputs(*found)
        # Graphs give results in buffers that the stage's next step writes over, while these may still be on their way.
        return tuple(found) if state.caches.runner is None else tuple(wire.clone() for wire in found)


def split_program(
    program: StepProgram,
    pp: int,
    layers: Sequence[int] | None = None,
    *,
    allow_shared_weights: bool = False,
    observers: Sequence[Observer] = (),
) -> tuple[StageProgram, ...]:
    """The stages of a program, which is not changed.

    Args:
        program: finished: of the records and expert layout that will run.
        pp: stages.
        layers: decoder layers of each stage; by default as :func:`even_layers` divides them.
        allow_shared_weights: let the drafter read weights that only an earlier stage has, as its embedding. Right in
            one process; a last stage of its own has no such table.
        observers: see each pass.

    Raises:
        ConfigError: more stages than layers, ``layers`` that do not add up, or a drafter without an embedding of its
            own.
        Refusal: the target cannot be cut at a layer.
    """
    bodies = program.target.bodies
    count = max(len(decoder_layers(bodies["replicated"].graph)), 1)
    if layers is not None and len(layers) != pp:
        raise ConfigError(f"layers={tuple(layers)} names {len(layers)} stages; required one number for each of pp={pp}")
    each = even_layers(count, pp) if layers is None else require_layers(layers, count)
    wanted: tuple[Variant, ...] = ("replicated",) if program.sharded is None else ("replicated", "sharded")
    parts: dict[str, tuple[BodyStage, ...]] = {
        name: split_body(bodies[name], PassContext(program.pcp, program.axis, name), each, observers) for name in wanted
    }
    for name, found in parts.items():
        for stage, own in zip(found, parts["replicated"], strict=True):
            assert _types(stage) == _types(own), f"the {name} body exchanges other rows than the replicated one"
    stages = tuple(StageProgram(program, index, each, parts, observers) for index in range(pp))
    shared = _shared_weights(stages)
    if shared and not allow_shared_weights:
        raise ConfigError(
            f"the drafter reads {', '.join(shared)} of the target, which the last of pp={pp} stages does not hold. "
            "Load the drafter with own_embedding=True, which takes the table from the drafter's checkpoint."
        )
    stages[-1].shared_weights = shared
    return stages


def _types(stage: BodyStage) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(wire.shape, wire.dtype) for wire in (*stage.takes, *stage.gives)]


def _between(stages: Sequence[BodyStage], index: int) -> tuple[Wire, ...]:
    """What crosses into stage ``index``, also on its way to a later one."""
    read = {wire.name for stage in stages[index:] for wire in stage.takes}
    return tuple(wire for stage in stages[:index] for wire in stage.gives if wire.name in read)


def _target(target: BodyModel, bodies: Mapping[str, fx.GraphModule], last: bool) -> BodyModel:
    written = {
        rules.layer_of(node)
        for node in bodies["replicated"].graph.nodes
        if isinstance(rules.rule_of(node), rules.CacheWrite)
    }
    held: Any = target
    changes = {"bodies": bodies, "layers": tuple(layer for layer in held.layers if layer in written)}
    if getattr(held, "captured", None):
        changes["captured"] = {}  # of all layers
    made: BodyModel = replace(held, **changes, **({} if last else {"head": _Elsewhere()}))
    return made


class _Elsewhere(nn.Module):
    """The head, where it is not."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        raise PcpError("this stage has no head: only the last stage samples. Ask the last stage of split_program")


def _root(gm: fx.GraphModule, target: BodyModel) -> nn.Module:
    """What ``gm`` calls, with the target's bodies exchanged."""
    root, held = nn.Module(), nn.Module()
    for name, module in gm.named_children():
        root.add_module(name, module)
    for name, module in gm.get_submodule("target").named_children():
        held.add_module(name, module)
    for variant, body in target.bodies.items():
        held.add_module(variant, BodyCall(body, variant, target.layers))
    root.add_module("target", held)
    return root


def _shared_weights(stages: Sequence[StageProgram]) -> tuple[str, ...]:
    """Parameters of the drafter that only earlier stages have otherwise."""
    earlier = {_storage(p) for stage in stages[:-1] for body in stage.target.bodies.values() for p in body.parameters()}
    named = {name: p for gm in (stages[-1].plain, stages[-1].sharded) if gm for name, p in gm.named_parameters()}
    own = {_storage(p) for name, p in named.items() if name.startswith("target.")}
    return tuple(
        name for name, p in named.items() if name.startswith("drafter.") and _storage(p) in earlier - own
    )  # fmt: skip


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
