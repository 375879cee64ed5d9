# SPDX-License-Identifier: Apache-2.0
"""The step program: one scheduling step from token ids to sampled tokens and drafts, as graphs.

::

    program = StepProgram(target, MTP(module, steps=3), pcp=4)
    state = RankState(PagedCaches(...))                        # one per rank
    outputs = program.run(state, inputs, plan)                 # this rank of a process group
    outputs = program.simulate(states, inputs, plans)          # all ranks in one process

``plan`` is ``None`` for a step whose layout is replicated (pure decoding), and for a dummy or profile step: then every
rank runs all tokens and nothing is gathered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx

from pcp_passes.collectives import CollectiveLog
from pcp_passes.errors import ConfigError
from pcp_passes.ir.copies import copy_graph, module_like
from pcp_passes.ir.printer import graph_fingerprint
from pcp_passes.paged import PagedCaches
from pcp_passes.paged.records import Store
from pcp_passes.passes.base import PassContext, Variant
from pcp_passes.passes.pipeline import Observer, Pipeline, PipelineReport
from pcp_passes.passes.steps.pipeline import step_pipeline
from pcp_passes.simulate import simulate_segments
from pcp_passes.speculative.contract import BodyModel, Drafter
from pcp_passes.step.builder import StepBuilder
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs, input_values, plan_values

ShareTopKOption = Literal["off", "owner"]
VerifyTokens = Literal["identical", "broadcast"]


@dataclass
class RankState:
    """What a rank keeps between steps."""

    caches: PagedCaches
    tables: torch.Tensor | None = field(default=None, repr=False)
    """The block-table buffer. Its address changes only when a step needs more rows than any before."""

    def table_buffer(self, rows: int, columns: int) -> torch.Tensor:
        """i32 rows for a step's block tables: at least ``rows``, exactly ``columns``."""
        held = self.tables
        if held is None or held.shape[0] < rows or held.shape[1] != columns:
            grown = max(rows, 0 if held is None or held.shape[1] != columns else 2 * held.shape[0])
            held = self.tables = torch.zeros((grown, columns), dtype=torch.int32, device=self.caches.device)
        return held


class StepProgram:
    """Target, sampling, verification and drafter as one program per kind of step.

    Attributes:
        plain: every rank runs all tokens; no collective (with ``verify_tokens="broadcast"``, none but those).
        sharded: for a step with a prefill on more than one rank; ``None`` when ``pcp`` is 1.
        reports: what each pass did, for ``replicated`` (plain) and ``sharded``.

    Args:
        target, drafter: captured bodies for this ``pcp``.
        pcp: P.
        axis: name of the axis in collectives.
        share_topk: ``owner`` lets draft steps from the second on use the top-k of the first.
        verify_tokens: ``broadcast`` makes all ranks go on with rank 0's tokens.
        keep_draft_logits: return what drafts were sampled from and use it in verification. Without, a draft counts as
            certain, which keeps the target's distribution too and accepts a little less.
        optimize: ``False`` leaves the sharded program as placed: correct, and gathering everything.
        observers: see each pass.

    Raises:
        ConfigError: options that cannot run together.
    """

    def __init__(
        self,
        target: BodyModel,
        drafter: Drafter,
        *,
        pcp: int,
        axis: str = "pcp",
        share_topk: ShareTopKOption = "off",
        verify_tokens: VerifyTokens = "identical",
        keep_draft_logits: bool = True,
        optimize: bool = True,
        observers: Sequence[Observer] = (),
    ) -> None:
        _check(target, drafter, pcp, share_topk, verify_tokens)
        self.target, self.drafter, self.pcp, self.axis = target, drafter, pcp, axis
        self.share_topk, self.verify_tokens = share_topk, verify_tokens
        self._options: dict[str, Any] = {
            "keep_draft_logits": keep_draft_logits,
            "optimize": optimize,
            "observers": tuple(observers),
        }
        built = StepBuilder(target, drafter, keep_draft_logits=keep_draft_logits).build()
        share, broadcast = share_topk == "owner", verify_tokens == "broadcast" and pcp > 1
        self.reports: dict[str, PipelineReport] = {}
        watching = tuple(observers)

        def rewritten(variant: Variant, pipeline: Pipeline) -> fx.GraphModule:
            graph = copy_graph(built)
            self.reports[variant] = pipeline.run_graph(graph, PassContext(pcp, axis, variant))
            return module_like(built, graph)

        self.plain = rewritten("replicated", step_pipeline("replicated", share, broadcast, observers=watching))
        self.sharded: fx.GraphModule | None = None
        if pcp > 1:
            pipeline = step_pipeline("sharded", share, broadcast, optimize, observers=watching)
            self.sharded = rewritten("sharded", pipeline)

    def storing(self, store: Store) -> StepProgram:
        """This program with bodies that write, and gather, other records (:mod:`pcp_passes.paged.records`).

        Models without a capture of their own, and those that write such records already, stay as they are.
        """
        return self._remade(lambda model, ctx: model if model.store == store else model.over(ctx, store))

    def dispatching(self, dp: int) -> StepProgram:
        """This program with experts that the ranks of ``dp`` replicas share (expert parallelism).

        Experts leave the bodies: each rank finds its own in ``PagedCaches.experts``. Models without experts, or without
        a capture of their own, stay as they are, and so does everything where the mesh has one rank.

        Raises:
            ConfigError: fewer than 1 replica.
        """
        if dp < 1:
            raise ConfigError(f"experts are shared by {dp} replicas; required at least 1")
        if dp * self.pcp == 1:
            return self
        return self._remade(lambda model, ctx: model.over(ctx, dp=dp) if model.has_experts else model)

    def _remade(self, make: Callable[[Any, PassContext], Any]) -> StepProgram:
        """The program with other bodies of the models that have a capture to make them of."""
        ctx = PassContext(self.pcp, self.axis)

        def remade(model: Any) -> Any:
            return make(model, ctx) if getattr(model, "captured", None) else model

        target, model = remade(self.target), remade(self.drafter.model)
        if target is self.target and model is self.drafter.model:
            return self
        drafter: Any = self.drafter
        return StepProgram(
            target, drafter if model is drafter.model else replace(drafter, model=model), pcp=self.pcp, axis=self.axis,
            share_topk=self.share_topk, verify_tokens=self.verify_tokens, **self._options,
        )  # fmt: skip

    @property
    def steps(self) -> int:
        """K."""
        return self.drafter.steps

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of both programs and all bodies: equal on all ranks of a group."""
        digest = hashlib.sha256()
        for program in (self.plain, self.sharded):
            if program is None:
                continue
            digest.update(graph_fingerprint(program).encode())
        for model in (self.target, self.drafter.model):
            for variant, body in sorted(model.bodies.items()) if model is not None else ():
                digest.update(f"{variant}:{graph_fingerprint(body)}".encode())
        return digest.hexdigest()

    def run(self, state: RankState, inputs: StepInputs, plan: StepPlanInputs | None = None) -> StepOutputs:
        """Run one step on this rank; collectives go over the group bound to the axis.

        Raises:
            ConfigError: a plan for a program of one rank.
        """
        with torch.no_grad():
            return StepOutputs(*chosen_program(self.plain, self.sharded, plan)(*program_values(state, inputs, plan)))

    def simulate(
        self,
        states: Sequence[RankState],
        inputs: Sequence[StepInputs],
        plans: Sequence[StepPlanInputs] | None = None,
        *,
        logs: list[CollectiveLog] | None = None,
    ) -> list[StepOutputs]:
        """Run one step on all ranks in this process, in lockstep.

        Args:
            states, inputs, plans: one per rank. The program writes over no input tensor, so ranks may share them.
            logs: filled with the collectives of each rank.

        Raises:
            RankMismatch: ranks diverge.
            ConfigError: counts that differ from ``pcp``.
        """
        if not len(states) == len(inputs) == len(plans or inputs) == self.pcp:
            raise ConfigError(
                f"found {len(states)} states, {len(inputs)} inputs and {len(plans or inputs)} plans for {self.pcp} "
                "ranks; required one of each per rank"
            )
        each = list(plans) if plans is not None else [None] * self.pcp
        values = [program_values(s, i, p) for s, i, p in zip(states, inputs, each, strict=True)]
        with torch.no_grad():
            found = simulate_segments(chosen_program(self.plain, self.sharded, each[0]), values, logs=logs)
        return [StepOutputs(*outputs) for outputs in found]


def chosen_program(
    plain: fx.GraphModule, sharded: fx.GraphModule | None, plan: StepPlanInputs | None
) -> fx.GraphModule:
    """The graph that a step with this plan runs. Raises ConfigError for a plan where there is no sharded one."""
    if plan is None:
        return plain
    if sharded is None:
        raise ConfigError("the step program was built for pcp=1; found a plan of several ranks. Give no plan.")
    return sharded


def program_values(state: RankState, inputs: StepInputs, plan: StepPlanInputs | None) -> tuple[Any, ...]:
    """The values of a program's inputs on one rank, in their order."""
    rows = inputs.requests.shape[0]
    if plan is not None:
        rows = max(rows, plan.row_request.shape[0])
    buffer = state.table_buffer(rows, inputs.block_table_pool.shape[1])
    values = (*input_values(inputs), buffer, state.caches)
    return values if plan is None else (*values, *plan_values(plan))


def _check(target: BodyModel, drafter: Drafter, pcp: int, share_topk: str, verify_tokens: str) -> None:
    if share_topk not in ("off", "owner"):
        raise ConfigError(f"share_topk is {share_topk!r}; required off or owner")
    if verify_tokens not in ("identical", "broadcast"):
        raise ConfigError(f"verify_tokens is {verify_tokens!r}; required identical or broadcast")
    model = drafter.model
    if pcp > 1 and "sharded" not in target.bodies:
        raise ConfigError(
            f"the target has bodies {sorted(target.bodies)}; required a sharded one for pcp={pcp}. Capture it with the "
            "passes of this package"
        )
    if model is None:
        if share_topk == "owner":
            raise ConfigError(
                "share_topk='owner' needs a drafter with an indexer; found no drafter. Set share_topk='off'"
            )
        return
    common = sorted(set(target.layers) & set(model.layers))
    if common:
        raise ConfigError(f"target and drafter share cache layers {', '.join(common)}; required names of their own")
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the drafter has {model.vocab_size} tokens, the target {target.vocab_size}; required the same vocabulary"
        )
    if share_topk == "owner" and "replicated_shared" not in model.bodies:
        raise ConfigError(
            f"share_topk='owner' needs a drafter body 'replicated_shared'; found {', '.join(sorted(model.bodies))}. "
            "Load the drafter with share_topk=True, or set share_topk='off'"
        )
