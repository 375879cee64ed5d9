# SPDX-License-Identifier: Apache-2.0
"""Small captured models for step programs, and a host that runs steps of one batch after another.

The models are of no use but sensitive: every hidden state depends on all tokens before it, so a wrong slot, row, shift
or table changes what is sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.ir.copies import copy_graph, module_like
from pcp_passes.layout import Batch, Layout, build_layout
from pcp_passes.paged import PagedCaches, index_topk, index_write, kv_attend, kv_write
from pcp_passes.passes import Observer, Pass, PassContext, Pipeline
from pcp_passes.passes.observers import DiffObserver
from pcp_passes.passes.steps.broadcast_verified import BroadcastVerified
from pcp_passes.passes.steps.pipeline import STEP
from pcp_passes.passes.steps.share_topk import ShareTopK
from pcp_passes.speculative.contract import Drafter
from pcp_passes.speculative.dspark import capture_dspark
from pcp_passes.speculative.dspark_model import DSpark as DSparkModule
from pcp_passes.speculative.dspark_model import DSparkConfig
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step import RankState, StepInputs, StepOutputs, StepPlanInputs, StepProgram, plan_inputs
from pcp_passes.step.builder import StepBuilder
from pcp_passes.step.invariants import OF_STEPS, ON_STEPS

HIDDEN, HEADS, DIM, VOCAB, TOPK = 16, 2, 8, 11, 3
BLOCK, COLUMNS = 4, 12


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Layer(nn.Module):
    """Attention with a position-dependent key; with ``topk``, what the indexer chose is seen in the output too."""

    def __init__(self, name: str, topk: bool = False) -> None:
        super().__init__()
        self.name, self.topk = name, topk
        self.qkv = nn.Linear(HIDDEN, 3 * HEADS * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, HIDDEN, bias=False)
        self.place = nn.Linear(2, HEADS * DIM, bias=False)

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, topk: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = self.qkv(_norm(x)).split(HEADS * DIM, -1)
        angle = positions.to(x.dtype)[:, None] * 0.7
        k = k + self.place(torch.cat([angle.sin(), angle.cos()], -1))
        if self.topk and topk is None:
            dep = index_write(k, self.name)
            topk = index_topk(q.view(-1, HEADS, DIM).repeat(1, 1, HEADS), x[:, :HEADS], dep, self.name, TOPK)
        q, k, v = (part.view(-1, HEADS, DIM) for part in (q, k, v))
        found = kv_attend(q, kv_write(k, v, self.name), self.name)
        x = x + self.out(found.reshape(-1, HEADS * DIM))
        if topk is not None:
            x = x + topk.to(x.dtype).sum(-1, keepdim=True).sin()
        return x, topk


class Target(nn.Module):
    def __init__(self, aux: bool) -> None:
        super().__init__()
        self.aux = aux
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(f"target.{i}") for i in range(2))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        x = self.embed(ids)
        between = []
        for layer in self.layers:
            x, _ = layer(x, positions)
            between.append(x)
        return (_norm(x), *between) if self.aux else _norm(x)


class Module(nn.Module):
    """A next-token module; with ``topk`` it returns its choice, and ``shared`` takes one instead."""

    def __init__(self, topk: bool, shared: bool = False) -> None:
        super().__init__()
        self.topk, self.shared = topk, shared
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.join = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layer = Layer("drafter.0", topk)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, given: torch.Tensor | None = None
    ) -> Any:
        x = self.join(torch.cat([_norm(self.embed(ids)), hidden], -1))
        x, topk = self.layer(x, positions, given)
        return (_norm(x), topk) if self.topk and not self.shared else _norm(x)


def _seeded(module: nn.Module, seed: int, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(seed)
    module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (3.0 / parameter.shape[-1]) ** 0.5)
    return module.to(dtype)


@cache
def _captured(aux: bool) -> Any:
    ids = torch.arange(7)
    return {"": prepare(_seeded(Target(aux), 1, torch.float64), (ids, ids))}


@cache
def _captured_module(topk: bool) -> Any:
    ids, hidden = torch.arange(7), torch.zeros(7, HIDDEN, dtype=torch.float64)
    module = _seeded(Module(topk), 3, torch.float64)
    found = {"": prepare(module, (ids, ids, hidden))}
    if topk:
        module.shared = True
        choice = torch.zeros(7, TOPK, dtype=torch.int32)
        found["replicated_shared"] = prepare(module, (ids, ids, hidden, choice))
    return found


@cache
def _head() -> nn.Module:
    return _seeded(nn.Linear(HIDDEN, VOCAB, bias=False), 2, torch.float64)


@cache
def target(pcp: int, aux: bool = False) -> Model:
    """Two attention layers in float64; with ``aux`` their outputs come with the hidden states."""
    bodies = make_bodies(_captured(aux), PassContext(pcp))
    return Model("target", bodies, _head(), HIDDEN, VOCAB, ("target.0", "target.1"), torch.float64)


@cache
def drafter(pcp: int, topk: bool = False) -> Model:
    """A next-token module that is often wrong."""
    bodies = make_bodies(_captured_module(topk), PassContext(pcp))
    return Model("drafter", bodies, _head(), HIDDEN, VOCAB, ("drafter.0",), torch.float64, TOPK if topk else 0)


@cache
def dspark(steps: int = 3) -> Any:
    """A block drafter of one layer with random weights, as the checkpoint's module, for targets with ``aux``."""
    config = DSparkConfig(VOCAB, HIDDEN, 1, HEADS, HEADS, DIM, 2 * HIDDEN, (0, 1), 3, 5, 4)
    return capture_dspark(_seeded(DSparkModule(config), 4, torch.float64), steps)


def block_program(pcp: int, steps: int = 3, **options: Any) -> StepProgram:
    """A program with the block drafter."""
    return StepProgram(target(pcp, aux=True), dspark(steps), pcp=pcp, **options)


def program(pcp: int, steps: int = 3, topk: bool = False, **options: Any) -> StepProgram:
    """A program of the two models."""
    kind: Drafter = MTP(drafter(pcp, topk), steps) if steps else NoDrafter()
    return StepProgram(target(pcp), kind, pcp=pcp, **options)


class RanksDifferError(AssertionError):
    """Ranks returned different tokens."""


@dataclass
class Request:
    """One request as a host knows it: ``tokens`` starts as the prompt."""

    tokens: list[int]
    temperature: float = 0.0
    seed: int = 0
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    draft_logits: torch.Tensor | None = None
    accepted: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)


@dataclass
class Host:
    """Runs batches on ``pcp`` simulated ranks (1: the plain program) and applies what they return, step by step."""

    program: StepProgram
    requests: list[Request]
    decode: str = "replicate"
    states: list[RankState] = field(init=False)
    outputs: list[StepOutputs] = field(default_factory=list)
    logs: list[CollectiveLog] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.requests) * COLUMNS
        dtype = self.program.target.dtype
        self.states = [RankState(PagedCaches(count, BLOCK, dtype)) for _ in range(self.program.pcp)]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(5)).to(torch.int32)
        self.pool = order.view(len(self.requests), COLUMNS)

    def batch(self, scheduled: Sequence[tuple[int, int]]) -> tuple[StepInputs, Layout]:
        """Inputs and layout of a step: ``(request, count)``: prompt tokens, or drafts to verify once it decodes."""
        rows = [(self.requests[r], r, n) for r, n in scheduled]
        ids: list[int] = []
        positions: list[int] = []
        logit_rows: list[int] = []
        lengths, logits, drafted, following = [], [], [], []
        steps = self.program.steps
        for request, _, count in rows:
            if request.computed < request.prompt:
                end = min(request.computed + count, request.prompt)
                new, drafts = request.tokens[request.computed : end], []
                following.append(request.tokens[end] if end < request.prompt else -1)
            else:
                drafts = request.drafts[:count]
                new = [request.tokens[-1], *drafts]
                following.append(-1)
            lengths.append(len(new))
            logits.append(1 + len(drafts))
            drafted.append(drafts + [-1] * (steps - len(drafts)))
            positions += range(request.computed, request.computed + len(new))
            ids += new
            logit_rows += range(len(ids) - 1 - len(drafts), len(ids))
        where, starts = torch.tensor(positions), torch.tensor([0, *lengths]).cumsum(0)
        owner = torch.tensor([r for _, r, _ in rows])
        per_token = owner.repeat_interleave(torch.tensor(lengths))
        kept = [
            torch.zeros(steps, VOCAB) if request.draft_logits is None else request.draft_logits
            for request, _, _ in rows
        ]
        inputs = StepInputs(
            input_ids=torch.tensor(ids),
            positions=where,
            slots=self.pool[per_token, where // BLOCK].long() * BLOCK + where % BLOCK,
            query_start_loc=starts,
            seq_lens=where[starts[1:] - 1] + 1,
            requests=owner,
            block_table_pool=self.pool,
            logit_rows=torch.tensor(logit_rows),
            cu_logits=torch.tensor([0, *logits]).cumsum(0),
            draft_ids=torch.tensor(drafted, dtype=torch.int64).view(len(rows), steps),
            next_prefill=torch.tensor(following),
            temperature=torch.tensor([request.temperature for request, _, _ in rows], dtype=torch.float64),
            seeds=torch.tensor([request.seed for request, _, _ in rows]),
            draft_logits=torch.stack(kept).to(self.program.target.dtype) if steps else None,
        )
        computed = [request.computed for request, _, _ in rows]
        described = Batch(lengths, computed, [request.prompt for request, _, _ in rows])
        return inputs, build_layout(described, self.program.pcp, decode=self.decode)

    def plans(self, inputs: StepInputs, layout: Layout) -> list[StepPlanInputs] | None:
        """Of all ranks, or ``None`` for the plain program."""
        if self.program.pcp == 1 or layout.is_replicated:
            return None
        return [plan_inputs(layout, rank, inputs.logit_rows.numpy()) for rank in range(self.program.pcp)]

    def step(self, scheduled: Sequence[tuple[int, int]]) -> StepOutputs:
        """Run one step on all ranks; every rank must return the same."""
        inputs, layout = self.batch(scheduled)
        found = self.program.simulate(
            self.states, [inputs] * self.program.pcp, self.plans(inputs, layout), logs=self.logs
        )
        for other in found[1:]:
            if not torch.equal(other.sampled, found[0].sampled) or not torch.equal(other.drafts, found[0].drafts):
                raise RanksDifferError("ranks sampled or drafted different tokens")
        self._apply(scheduled, inputs, found[0])
        self.outputs.append(found[0])
        return found[0]

    def _apply(self, scheduled: Sequence[tuple[int, int]], inputs: StepInputs, outputs: StepOutputs) -> None:
        lengths = inputs.query_start_loc.diff().tolist()
        for row, (index, _) in enumerate(scheduled):
            request = self.requests[index]
            request.computed += lengths[row] - int(outputs.num_rejected[row])
            count = int(outputs.num_sampled[row])
            if not count:
                continue
            request.tokens += outputs.sampled[row, :count].tolist()
            request.logprobs += outputs.logprobs[row, :count].tolist()
            request.accepted.append(count - 1)
            request.drafts = outputs.drafts[row].tolist()
            request.draft_logits = None if outputs.draft_logits is None else outputs.draft_logits[row]


def requests(seed: int = 0, lengths: Sequence[int] = (17, 6, 1, 9), temperature: float = 0.0) -> list[Request]:
    """Prompts of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(torch.randint(0, VOCAB, (n,), generator=generator).tolist(), temperature, 100 + i)
        for i, n in enumerate(lengths)
    ]


MIXED: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 9), (1, 6)),                          # a chunk, and a whole prompt
    ((1, 3), (0, 7), (2, 1)),                  # verification beside a chunk and a one-token prompt
    ((2, 2), (1, 1), (0, 1)),                  # the last chunk is one token: prefill by state
    ((1, 3), (2, 0), (0, 3), (3, 9)),
    ((3, 3), (1, 2), (0, 1), (2, 3)),          # decoding only: no plan
    ((0, 3), (3, 3)),
)  # fmt: skip
"""Steps over ``requests()``: prefill, chunks, different draft counts, ranks without rows, changing order."""


def run(made: StepProgram, steps: Any = MIXED, decode: str = "replicate", **given: Any) -> Host:
    """All steps on fresh requests."""
    host = Host(made, requests(**given), decode)
    for scheduled in steps:
        host.step(scheduled)
    return host


def difference(host: Host, other: Host) -> float:
    """Largest difference of log probabilities and caches; infinite where tokens or accepted counts differ."""
    for mine, theirs in zip(host.requests, other.requests, strict=True):
        if (mine.tokens, mine.accepted) != (theirs.tokens, theirs.accepted):
            return math.inf
    worst = max(
        abs(a - b)
        for mine, theirs in zip(host.requests, other.requests, strict=True)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)
    )
    for state in host.states:
        for name, held in state.caches.tensors.items():
            worst = max(worst, float((held - other.states[0].caches.tensors[name]).abs().max()))
    return worst


def damage(made: StepProgram, alone: Host, **given: Any) -> float:
    """:func:`difference` of a program that may be broken; infinite when its ranks disagree."""
    try:
        return difference(run(made, **given), alone)
    except RanksDifferError:
        return math.inf


def with_passes(made: StepProgram, passes: Sequence[Pass], *, observers: Sequence[Observer] = ()) -> StepProgram:
    """The program of two or more ranks with its sharded part made by other passes. Nothing is required of its end."""
    built = StepBuilder(made.target, made.drafter, keep_draft_logits=True).build()
    graph = copy_graph(built)
    pipeline = Pipeline(tuple(passes), tuple(observers), always=ON_STEPS, given=OF_STEPS)
    pipeline.run_graph(graph, PassContext(made.pcp, made.axis))
    made.sharded = module_like(built, graph)
    return made


def without(made: StepProgram, unwanted: type[Any]) -> StepProgram:
    """The program with one pass left out."""
    optional = () if made.share_topk == "owner" else (ShareTopK,)
    return with_passes(made, [p for p in STEP if type(p) not in (unwanted, BroadcastVerified, *optional)])


def changes(made: StepProgram, name: str) -> tuple[list[str], list[str]]:
    """Lines that a pass of the sharded program took away and put in, without comments."""
    diffs = DiffObserver()
    options = {"share_topk": made.share_topk, "verify_tokens": made.verify_tokens}
    StepProgram(made.target, made.drafter, pcp=made.pcp, observers=(diffs,), **options)  # type: ignore[arg-type]
    lines = [line.partition("   # ")[0] for line in diffs.diffs["sharded"][name].splitlines()[2:]]
    taken = [line[1:] for line in lines if line.startswith("-")]
    put = [line[1:] for line in lines if line.startswith("+")]
    return taken, put
