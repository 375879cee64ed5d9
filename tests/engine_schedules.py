# SPDX-License-Identifier: Apache-2.0
"""Random schedules for the embedded engine, and the comparison of what two engines made of one.

A schedule says when requests arrive and are aborted, and how the engine is sized; it knows nothing of ranks. So the
same schedule runs with PCP=1 and PCP=P, and everything that a user or a cache could see must be equal::

    schedule = make_schedule(7)
    assert not compare(run_schedule(schedule, 4), run_schedule(schedule, 1)).first
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.bodies import Model
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.executor import Executor
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.request import RequestOutput
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.paged import PagedCaches
from pcp_passes.passes import PassContext
from pcp_passes.speculative.mtp import MTP
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs
from pcp_passes.step.program import StepProgram
from tests import steps as small

CHECKPOINT = Path(__file__).resolve().parents[1] / "examples" / "checkpoints" / "tiny-glm-dsa"
BOS, VOCAB = 256, 264
ATOL = 1e-9
"""Of log probabilities and owned cache rows in float64: measured up to 3e-14; another token's row differs by 1e-2."""

ProgramOf = Callable[[int, int], StepProgram]
"""``(pcp, steps)`` to a program; keep what is captured, it is asked for often."""

_TEXT = """The for statement is used to iterate over the elements of a sequence (such as a string, tuple or list) or
other iterable object. A function definition is an executable statement: its execution binds the function
name in the current local namespace to a function object. Return the number of items in a container. Raises
KeyError when the key is not found, unless a default was given. If no argument is given, the constructor
creates a new empty list. The with statement is used to wrap the execution of a block with methods defined
by a context manager. def run(self, *args, **kwargs): """


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before step ``step``."""

    step: int
    id: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Schedule:
    """``options`` with ``pcp`` unset; ``aborts`` are ``(step, id)``, without effect on a request that has ended."""

    seed: int
    steps: int
    options: EngineOptions
    arrivals: tuple[Arrival, ...]
    aborts: tuple[tuple[int, str], ...]


@dataclass(frozen=True, eq=False)
class Trace:
    """What a run gave.

    ``caches``: of each rank here, by name, one row per slot. ``written``: slots that were, by owner (``"target"``,
    ``"drafter"``). ``summary``: of the engine.
    """

    outputs: dict[str, RequestOutput]
    caches: list[dict[str, torch.Tensor]]
    written: dict[str, torch.Tensor]
    summary: dict[str, Any]

    @property
    def counts(self) -> dict[str, int]:
        """How much of each thing happened."""
        outputs = self.outputs.values()
        return {
            "requests": len(self.outputs),
            "tokens": sum(len(output.tokens) for output in outputs),
            "drafted": sum(sum(output.drafted) for output in outputs),
            "accepted": sum(sum(output.accepted) for output in outputs),
            "preemptions": self.summary["preemptions"],
            "aborts": sum(output.finish_reason == "abort" for output in outputs),
            "cached_tokens": self.summary["cached_tokens"],
            "steps": self.summary["steps"],
            "sharded_steps": self.summary["sharded_steps"],
        }


@dataclass(frozen=True)
class Difference:
    """``first``: what differs first, empty when nothing does. ``cache`` and ``logprob``: the largest differences."""

    first: str
    cache: float
    logprob: float


def make_schedule(
    seed: int,
    *,
    max_requests: int = 6,
    longest: int = 200,
    vocab: int = VOCAB,
    steps: int | None = None,
    cache_dtype: str = "auto",
) -> Schedule:
    """A random schedule, a function of its arguments alone. ``vocab`` below 256 draws prompts of random tokens."""
    rng = random.Random(seed)
    drafts = rng.randint(1, 5) if steps is None else steps
    options = EngineOptions(
        block_size=rng.choice((8, 16)),
        num_blocks=10_000,
        max_requests=rng.randint(2, 6),
        budget=rng.choice((16, 24, 48, 96, 256)),
        long_prefill_threshold=rng.choice((0, 0, 16, 40)),
        layout=rng.choice(("zigzag", "zigzag", "contiguous")),
        decode=rng.choice(("replicate", "replicate", "owner")),
        prefix_cache=rng.random() < 0.8,
        cache_dtype=cache_dtype,
    )
    arrivals, aborts, now = [], [], 0
    for index in range(rng.randint(3, max_requests)):
        length = rng.choice((1, 2, rng.randint(3, 20), rng.randint(20, longest), rng.randint(20, longest)))
        params = SamplingParams(
            max_tokens=rng.randint(1, 16),
            temperature=rng.choice((0.0, 0.0, 0.7, 1.0)),
            seed=rng.randrange(1 << 30),
            eos=rng.choice(((), (), (32 % vocab,), (10 % vocab, 257 % vocab))),
        )
        arrivals.append(Arrival(now, f"r{index}", _prompt(rng, length, vocab), params))
        if rng.random() < 0.15:
            aborts.append((now + rng.randint(1, 8), f"r{index}"))
        now += rng.choice((0, 0, 1, 4))
    # Few blocks: the longest request always fits, several may not, so some are preempted.
    options = replace(options, max_len=max(len(one.prompt) + one.params.max_tokens for one in arrivals))
    options = replace(options, num_blocks=options.blocks_per_request(drafts) + rng.choice((0, 1, 3, 30)))
    return Schedule(seed, drafts, options, tuple(arrivals), tuple(aborts))


def _prompt(rng: random.Random, length: int, vocab: int) -> tuple[int, ...]:
    """Mostly a beginning that other prompts share, then text from somewhere else."""
    shared = rng.choice((0, length, length, rng.randint(0, length)))
    start = rng.randrange(len(_TEXT))
    tokens = [BOS, *_TEXT.encode()][:shared] + list((_TEXT[start:] + _TEXT * 2).encode())
    return tuple(token % vocab for token in tokens[:length])


@functools.cache
def glm_models(pcp: int) -> tuple[Model, Model]:
    """The shipped GLM-DSA and its MTP layer, in float64 throughout. One capture serves every number of ranks."""
    from pcp_passes.frontends.transformers.mtp import load_mtp
    from pcp_passes.frontends.transformers.target import load_target

    context = PassContext(pcp)
    if pcp != 1:
        target, drafter = glm_models(1)
        return target.over(context), drafter.over(context)
    model = glm_hf()
    return load_target(model, ctx=context), load_mtp(model, CHECKPOINT, ctx=context)


@functools.cache
def glm_hf() -> Any:
    """The shipped model as transformers loads it, in float64."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float64, experts_implementation="eager").eval()


@functools.cache
def glm_program(pcp: int, steps: int, **options: Any) -> StepProgram:
    """The shipped model with MTP; ``steps`` 0 has no drafter."""
    target, drafter = glm_models(pcp)
    return StepProgram(target, MTP(drafter, steps) if steps else NoDrafter(), pcp=pcp, **options)


@functools.cache
def fp8_program(pcp: int, steps: int) -> StepProgram:
    """The shipped model with MTP, whose bodies gather FP8 records; for options with ``cache_dtype="fp8"``."""
    return glm_program(pcp, steps).storing("fp8")


@functools.cache
def small_program(pcp: int, steps: int, **options: Any) -> StepProgram:
    """The models of ``tests/steps.py``: a step takes milliseconds. Make schedules with ``vocab=small.VOCAB``."""
    return small.program(pcp, steps, **options)


class Watched(SimulatedExecutor):
    """Notes the slots that each step writes; with ``check_steps`` also compares all others before and after it."""

    check_steps = True

    def __init__(self, program: StepProgram, options: EngineOptions) -> None:
        super().__init__(program, options)
        slots = options.num_blocks * options.block_size
        self.written = {owner: torch.zeros(slots, dtype=torch.bool) for owner in ("target", "drafter")}

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        before = [self._rows(rank) for rank in range(len(self.ranks))] if self.check_steps else []
        outputs, log = super()._run(inputs, plans)
        owned = owned_slots(inputs[0], outputs[0], self.steps, self.options)
        for owner, slots in owned.items():
            self.written[owner] |= slots
        for rank, earlier in enumerate(before):
            now = self._rows(rank)
            for name, old in earlier.items():
                other = ~owned[name.split(".")[0]]
                assert torch.equal(old[other], now[name][other]), (
                    f"rank {rank}: the step changed slots of {name} that it does not own"
                )
        return outputs, log

    def _rows(self, rank: int) -> dict[str, torch.Tensor]:
        return {name: rows.clone() for name, rows in cache_rows(self.ranks[rank].memory.caches).items()}


def cache_rows(caches: PagedCaches) -> dict[str, torch.Tensor]:
    """The caches by name, one row per slot."""
    return {name: caches.by_slot(name) for name in caches.tensors}


def owned_slots(
    inputs: StepInputs, outputs: StepOutputs, steps: int, options: EngineOptions
) -> dict[str, torch.Tensor]:
    """bool[slots] of what a step may write: its tokens' slots, and those of the drafter's later rows in its own caches.

    Those begin after the last valid token: MTP writes ``steps - 1`` of them, a block drafter ``steps``.
    """
    target = torch.zeros(options.num_blocks * options.block_size, dtype=torch.bool)
    target[inputs.slots[inputs.slots >= 0]] = True
    drafter, size = target.clone(), options.block_size
    last = inputs.seq_lens - 1 - outputs.num_rejected
    for r in torch.nonzero((outputs.num_sampled > 0) & (inputs.seq_lens > 0)).flatten().tolist() if steps else ():
        for position in range(int(last[r]) + 1, int(last[r]) + 1 + steps):
            block = int(inputs.block_table_pool[inputs.requests[r], position // size])
            assert block >= 0, "a draft row past the request's blocks"
            drafter[block * size + position % size] = True
    return {"target": target, "drafter": drafter}


def run_schedule(
    schedule: Schedule,
    pcp: int,
    program_of: ProgramOf = glm_program,
    executor: Callable[[StepProgram, EngineOptions], Executor] = Watched,
    depth: int | None = None,
) -> Trace:
    """Run a schedule with ``pcp`` ranks: in the simulator, or on what ``executor`` makes; ``depth`` steps in flight."""
    made = executor(program_of(pcp, schedule.steps), replace(schedule.options, pcp=pcp))
    engine = Engine(made, depth=depth)
    outputs = drive(engine, schedule)
    engine.close()
    caches = [cache_rows(rank.memory.caches) for rank in made.ranks]
    return Trace(outputs, caches, getattr(made, "written", {}), engine.summary())


def drive(engine: Engine, schedule: Schedule) -> dict[str, RequestOutput]:
    """Feed a schedule to an engine and step it to the end."""
    outputs: dict[str, RequestOutput] = {}
    arrivals, now = list(schedule.arrivals), 0
    while arrivals or engine.unfinished:
        while arrivals and arrivals[0].step <= now:
            one = arrivals.pop(0)
            engine.add_request(one.prompt, one.params, one.id)
        for step, name in schedule.aborts:
            if step == now and name in engine.scheduler.requests:
                outputs[name] = engine.abort(name)
        if engine.unfinished:
            outputs.update((output.id, output) for output in engine.step())
        now += 1
    return outputs


def compare(found: Trace, wanted: Trace) -> Difference:
    """Compare two runs of one schedule; ``wanted`` is of PCP=1 and knows which slots were written."""
    notes: list[str] = []
    cache = logprob = 0.0
    if found.outputs.keys() != wanted.outputs.keys():
        notes.append(f"outputs of {sorted(found.outputs)} and {sorted(wanted.outputs)}")
    for name in sorted(found.outputs.keys() & wanted.outputs.keys()):
        mine, other = found.outputs[name], wanted.outputs[name]
        for what in ("tokens", "drafted", "accepted", "finish_reason", "preemptions", "cached_tokens"):
            if getattr(mine, what) != getattr(other, what):
                notes.append(f"{name}: {what} {getattr(mine, what)} and {getattr(other, what)}")
        worst = max((abs(a - b) for a, b in zip(mine.logprobs, other.logprobs, strict=False)), default=0.0)
        logprob = max(logprob, worst)
        if not worst <= ATOL:
            notes.append(f"{name}: logprobs differ by {worst:.3g}")
    if found.summary["acceptance"] != wanted.summary["acceptance"]:
        notes.append("acceptance counters")
    for rank, caches in enumerate(found.caches):
        if caches.keys() != wanted.caches[0].keys():
            notes.append(f"rank {rank}: caches {sorted(caches)} and {sorted(wanted.caches[0])}")
            continue
        for name, rows in caches.items():
            worst, said = _compare_cache(rows, wanted.caches[0][name], wanted.written[name.split(".")[0]])
            cache = max(cache, worst)
            notes += [f"rank {rank} {name}: {one}" for one in said]
    return Difference(notes[0] if notes else "", cache, logprob)


def _compare_cache(found: torch.Tensor, wanted: torch.Tensor, written: torch.Tensor) -> tuple[float, list[str]]:
    if found.shape != wanted.shape:
        return float("inf"), [f"shapes {list(found.shape)} and {list(wanted.shape)}"]
    mine, other = (rows.long() if rows.dtype == torch.uint8 else rows for rows in (found, wanted))
    worst = float((mine[written] - other[written]).abs().max()) if bool(written.any()) else 0.0
    said = [] if worst <= ATOL else [f"owned rows differ by {worst:.3g}"]
    if mine[~written].any():
        said.append("a slot holds something that PCP=1 never writes")
    if other[~written].any():
        said.append("PCP=1 wrote a slot that it does not own")
    return worst, said
