# SPDX-License-Identifier: Apache-2.0
"""Step programs cut into pipeline stages: every stage chain gives what the whole program gives, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

pytest.importorskip("transformers")

from safetensors.torch import save_file

from pcp_passes.collectives import CollectiveLog, is_collective
from pcp_passes.engine.bodies import Model
from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.frontends.transformers.mtp import load_mtp
from pcp_passes.frontends.transformers.target import load_target
from pcp_passes.ir.printer import graph_fingerprint, print_graph
from pcp_passes.paged import PagedCaches
from pcp_passes.passes import PassContext
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.piecewise.prepare import prepare
from pcp_passes.piecewise.runner import BodyRunner
from pcp_passes.speculative.dspark_model import DSpark, DSparkConfig, load_dspark
from pcp_passes.speculative.mtp import MTP
from pcp_passes.step import RankState, StepInputs, StepOutputs, StepPlanInputs, StepProgram
from pcp_passes.step.stages import StageProgram, split_program
from tests import graph_steps, steps
from tests.unit.transformers import tiny
from tests.unit.transformers.test_mtp import on_disk
from tests.unit.transformers.test_targets import double

pytestmark = pytest.mark.unit
Wires = tuple[torch.Tensor, ...]
Damage = Callable[[list[Wires]], list[Wires]]


@dataclass
class Chain:
    """All stages of a program, with caches of their own, in the place of the program of a :class:`steps.Host`."""

    stages: tuple[StageProgram, ...]
    damage: Damage = list
    states: list[list[RankState]] = field(default_factory=list)
    logs: list[list[CollectiveLog]] = field(default_factory=list)

    @property
    def pcp(self) -> int:
        return self.stages[0].pcp

    @property
    def steps(self) -> int:
        return self.stages[0].steps

    @property
    def target(self) -> Any:
        return self.stages[0].target

    @staticmethod
    def fresh(like: RankState) -> RankState:
        """Empty caches of the same size."""
        return RankState(PagedCaches(like.caches.num_blocks, like.caches.block_size, like.caches.dtype))

    def simulate(
        self,
        states: Sequence[RankState],
        inputs: Sequence[StepInputs],
        plans: Sequence[StepPlanInputs] | None,
        logs: list[CollectiveLog] | None,
    ) -> list[StepOutputs]:
        if not self.states:
            self.states = [[self.fresh(state) for state in states] for _ in self.stages]
        self.logs = []
        found: Any = None
        for stage, held in zip(self.stages, self.states, strict=True):
            own: list[CollectiveLog] = []
            wires = None if found is None else self.damage(found)
            found = stage.simulate(held, inputs, plans, wires, logs=own)
            self.logs.append(own)
        for rank, state in enumerate(states):  # for the comparison of caches, which must not overlap
            for stage, held in zip(self.stages, self.states, strict=True):
                assert {name.rpartition(".")[0] for name in held[rank].caches.tensors} <= set(stage.cache_layers)
                state.caches.tensors.update(held[rank].caches.tensors)
        if logs is not None:
            logs[:] = [sum_of(own[rank] for own in self.logs) for rank in range(len(states))]
        return list(found)


def sum_of(logs: Any) -> CollectiveLog:
    whole = CollectiveLog()
    for log in logs:
        whole.entries += log.entries
    return whole


@cache
def captured(kind: str) -> tuple[Model, Model]:
    """Target and MTP layer of a tiny model in float64; the layer's embedding is its own, and not the target's."""
    model = double(kind)
    table = {f"model.layers.{model.config.num_hidden_layers}.embed_tokens.weight": OWN_TABLE}
    alone = PassContext(1)
    return load_target(model, ctx=alone), load_mtp(model, on_disk(kind) | table, ctx=alone, own_embedding=True)


OWN_TABLE = torch.randn(tiny.VOCABULARY, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def program(kind: str, pcp: int, **options: Any) -> StepProgram:
    """``small``, ``block`` (auxiliary states), or a model of transformers with its MTP layer."""
    if kind in ("small", "block"):
        return steps.program(pcp, 2, **options) if kind == "small" else steps.block_program(pcp, 3)
    target, drafter = (model.over(PassContext(pcp)) for model in captured(kind))
    return StepProgram(target, MTP(drafter, 2), pcp=pcp, keep_draft_logits=False, **options)


def chain(made: StepProgram, layers: tuple[int, ...], damage: Damage = list, steps_of: Any = steps.MIXED) -> steps.Host:
    stages = split_program(made, len(layers), layers)
    return steps.run(Chain(stages, damage), steps_of)  # type: ignore[arg-type]


@cache
def whole(kind: str, pcp: int) -> steps.Host:
    return steps.run(program(kind, pcp))


KINDS = {
    "small": (1, 1),
    "block": (1, 1),
    "deepseek_v3": (1, 1),
    "glm_moe_dsa": (1, 2),  # the second stage starts on a layer that reuses the first one's top-k
}


def identical(found: steps.Host, wanted: steps.Host) -> bool:
    """Bit for bit: everything returned at each step, and every cache row."""
    for mine, theirs in zip(found.outputs, wanted.outputs, strict=True):
        for a, b in zip(vars(mine).values(), vars(theirs).values(), strict=True):
            if not (a is b is None or torch.equal(a, b)):
                return False
    return all(
        mine.caches.tensors.keys() == theirs.caches.tensors.keys()
        and all(torch.equal(held, theirs.caches.tensors[name]) for name, held in mine.caches.tensors.items())
        for mine, theirs in zip(found.states, wanted.states, strict=True)
    )


@pytest.mark.parametrize("pcp", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_stages_in_turn_are_the_program(kind: str, pcp: int) -> None:
    found, wanted = chain(program(kind, pcp), KINDS[kind]), whole(kind, pcp)
    assert identical(found, wanted)
    assert any(request.accepted for request in found.requests)
    assert [log.entries for log in found.logs] == [log.entries for log in wanted.logs]


HIDDEN, CHOSEN = ((32,), torch.float64), ((5,), torch.int32)


@pytest.mark.parametrize(
    ("layers", "wires"),
    [((1, 2), [[], [CHOSEN, HIDDEN]]), ((2, 1), [[], [HIDDEN]]), ((1, 1, 1), [[], [CHOSEN, HIDDEN], [HIDDEN]])],
)
def test_top_k_rows_travel_only_where_a_stage_starts_on_a_layer_that_reuses_them(layers: Any, wires: Any) -> None:
    stages = split_program(program("glm_moe_dsa", 2), len(layers), layers)
    assert [[(wire.shape, wire.dtype) for wire in stage.wires_in] for stage in stages] == wires
    if layers != KINDS["glm_moe_dsa"]:
        assert identical(steps.run(Chain(stages)), whole("glm_moe_dsa", 2))  # type: ignore[arg-type]


def test_states_for_the_drafter_travel_to_the_last_stage() -> None:
    """Layer 0 of two, whose rows are also what the next stage goes on with: they travel once."""
    first, last = split_program(program("block", 2), 2)
    assert [w.shape for w in first.wires_out] == [(16,)] and last.wires_in == first.wires_out
    assert set(last.cache_layers) == {"target.1", "drafter.0"} and first.cache_layers == ("target.0",)


class InPieces(graph_steps.GraphHost):
    """A host of a chain whose bodies run through graphs on buckets."""

    def __post_init__(self) -> None:
        steps.Host.__post_init__(self)
        stages: Any = self.program
        stages.states = [[stages.fresh(state) for state in self.states] for _ in stages.stages]
        self.made = []
        for stage, held in zip(stages.stages, stages.states, strict=True):
            prepared = prepare(stage)
            for state in held:
                state.caches.runner = BodyRunner(
                    prepared, state.caches, rows_max=graph_steps.ROWS[-1], requests_max=graph_steps.REQUESTS[-1],
                    columns=steps.COLUMNS, max_bytes=graph_steps.MAX_BYTES,
                )  # fmt: skip
                self.made.append(state.caches.runner)

    @property
    def runners(self) -> list[BodyRunner]:
        return self.made


@pytest.mark.parametrize("kind", ["small", "block"])
def test_stages_run_through_graphs(kind: str) -> None:
    """Rows are padded to buckets, which rounds otherwise: measured 5e-15; a damaged wire gives 0.1 and more."""
    host = InPieces(Chain(split_program(program(kind, 2), 2)), steps.requests())  # type: ignore[arg-type]
    for scheduled in steps.MIXED:
        host.step(scheduled)
    assert steps.difference(host, whole(kind, 2)) < 1e-12
    assert all(runner.replayer.hits for runner in host.runners)


def test_wires_of_a_graph_outlive_the_next_step() -> None:
    host = InPieces(Chain(split_program(program("small", 1), 2)), steps.requests())  # type: ignore[arg-type]
    stages: Any = host.program
    first, (state,) = stages.stages[0], stages.states[0]
    inputs, _ = host.batch([(0, 9), (1, 6)])
    (rows,) = first.run(state, inputs)
    before = rows.clone()
    first.run(state, replace(inputs, input_ids=inputs.input_ids.flip(0)))
    assert torch.equal(rows, before)


DAMAGES: dict[str, Damage] = {
    "another rank's rows": lambda wires: wires[::-1],
    "rows in another order": lambda wires: [tuple(x.flip(0) for x in own) for own in wires],
    "a lost wire": lambda wires: [tuple(torch.zeros_like(x) for x in own) for own in wires],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_wire_is_seen(name: str) -> None:
    """Sabotage. Ranks that end up with other tokens count as seen, as elsewhere."""

    try:
        found = chain(program("small", 2), (1, 1), DAMAGES[name], steps.MIXED[:3])
    except steps.RanksDifferError:
        return
    assert not identical(found, steps.run(program("small", 2), steps.MIXED[:3]))


def test_a_damaged_top_k_is_seen() -> None:
    def mixed(wires: list[Wires]) -> list[Wires]:
        return [(torch.zeros_like(own[0]), own[1]) for own in wires]

    found = chain(program("glm_moe_dsa", 2), (1, 2), mixed, steps.MIXED[:3])
    assert not identical(found, steps.run(program("glm_moe_dsa", 2), steps.MIXED[:3]))


def test_wires_that_are_not_those_of_the_stage_are_refused() -> None:
    host = steps.Host(program("small", 2), steps.requests())
    inputs, layout = host.batch(steps.MIXED[0])
    plans = host.plans(inputs, layout)
    first, last = split_program(host.program, 2)
    wires = first.simulate(host.states, [inputs] * 2, plans)
    rows = int(inputs.input_ids.shape[0])
    for given in (None, [(), ()], [(*own, *own) for own in wires], [(torch.zeros(rows, 16),)] * 2):
        with pytest.raises(ConfigError, match=r"stage 1 of 2 got wires .*required float64"):
            last.simulate(host.states, [inputs] * 2, plans, given)
    with pytest.raises(ConfigError, match=r"stage 0 of 2 got wires float64.*required none"):
        first.simulate(host.states, [inputs] * 2, plans, wires)
    with pytest.raises(ConfigError, match="2 states, 1 inputs"):
        first.simulate(host.states, [inputs], plans)


def test_a_stage_holds_its_own_weights_only() -> None:
    made = program("deepseek_v3", 2)
    first, last = split_program(made, 2)
    names = [
        {n for gm in (stage.plain, stage.sharded) for n, _ in gm.named_parameters(remove_duplicate=False)}
        for stage in (first, last)
    ]
    assert all("decoder.layers.0." in n or "embed_tokens" in n for n in names[0])
    assert all("decoder.layers.0." not in n and not n.endswith("decoder.embed_tokens.weight") for n in names[1])
    assert {n.partition(".")[0] for n in names[1]} == {"target", "drafter"} and "target.head.head.weight" in names[1]
    assert first.drafter is None and last.drafter is made.drafter and not first.target.captured
    with pytest.raises(PcpError, match="only the last stage samples"):
        first.target.head(torch.zeros(1, 32))


def test_only_the_last_stage_restores() -> None:
    first, last = split_program(program("small", 2), 2)
    assert not [node for node in first.sharded.graph.nodes if is_collective(node)]
    assert [node for node in last.sharded.graph.nodes if is_collective(node)]


def test_one_stage_is_the_program() -> None:
    made = program("small", 2)
    (only,) = split_program(made, 1)
    assert only.is_first and only.is_last and not only.wires_in
    assert only.cache_layers == ("target.0", "target.1", "drafter.0")
    for found, wanted in ((only.plain, made.plain), (only.sharded, made.sharded)):
        assert graph_fingerprint(found) == graph_fingerprint(wanted)
    assert identical(chain(made, (2,), steps_of=steps.MIXED[:2]), steps.run(made, steps.MIXED[:2]))


def test_fingerprints_are_equal_on_equal_stages_only() -> None:
    made, other = program("small", 2), program("block", 2)
    prints = [[stage.fingerprint for stage in split_program(one, 2)] for one in (made, made, other)]
    assert prints[0] == prints[1] and len({*prints[0], *prints[2]}) == 4


def test_divisions_that_do_not_fit_are_refused() -> None:
    made = program("small", 1)
    for pp, layers, why in (
        (3, None, "pp=3 stages need a layer each, and the model has 2"), (0, None, "pp must be at least 1, found 0"),
        (2, (2, 0), r"layers=\(2, 0\) sums to 2; required a layer or more"), (2, (1, 2), "sums to 3"),
        (2, (2,), "names 1 stages"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=why):
            split_program(made, pp, layers)


def test_a_drafter_that_reads_the_targets_table_is_refused() -> None:
    alone = PassContext(1)
    drafter = load_mtp(double("deepseek_v3"), on_disk("deepseek_v3"), ctx=alone)
    made = StepProgram(captured("deepseek_v3")[0], MTP(drafter, 2), pcp=1)
    with pytest.raises(ConfigError, match=r"reads drafter.*embed_tokens.weight of the target.*own_embedding=True"):
        split_program(made, 2)
    assert split_program(made, 1)[0].shared_weights == ()
    stages = split_program(made, 2, allow_shared_weights=True)
    assert stages[1].shared_weights == ("drafter.replicated.body.embed_tokens.weight",)


def test_each_pass_is_checked() -> None:
    watched = VerifyObserver()
    split_program(program("small", 2), 2, observers=[watched])


@pytest.mark.parametrize("changes", [{"dp": 2}, {"store": "fp8"}], ids=str)
def test_a_program_with_shared_experts_or_fp8_records_is_cut_at_the_same_place(changes: dict[str, Any]) -> None:
    """Collectives of experts and of records stay with their layers: the split checks that none is lost or doubled."""
    target, drafter = (model.over(PassContext(2), **changes) for model in captured("glm_moe_dsa"))
    made = StepProgram(target, MTP(drafter, 2), pcp=2, keep_draft_logits=False)
    first, last = split_program(made, 2, (1, 2))
    assert first.wires_out == split_program(program("glm_moe_dsa", 2), 2, (1, 2))[0].wires_out
    counts = [sum(map(is_collective, stage.target.bodies["sharded"].graph.nodes)) for stage in (first, last)]
    assert sum(counts) == sum(map(is_collective, target.bodies["sharded"].graph.nodes)) and min(counts) > 0


def printed(gm: fx.GraphModule) -> list[str]:
    return print_graph(gm, comments=False).splitlines()


def test_keep_stage_adds_the_wires_and_cuts_behind_the_call() -> None:
    made = program("small", 2)
    first, last = split_program(made, 2)
    wanted, call = printed(made.sharded), "%target : f64[sM, 16] shard(0) = module target.sharded(%shard, %shard_1, "
    behind = wanted.index(f"{call}%row_inputs, %caches)")
    head = [line for line in wanted[:behind] if "%last_rows" not in line]
    assert printed(first.sharded) == [*head, wanted[behind], "return [%target]"]
    begin = next(i for i, line in enumerate(wanted) if not line.endswith(" = input"))
    assert printed(last.sharded) == [
        *wanted[:begin], "%add_79 : f64[sM, 16] shard(0) = input", *wanted[begin:behind],
        f"{call}%add_79, %row_inputs, %caches)", *wanted[behind + 1 :],
    ]  # fmt: skip


def test_an_embedding_of_its_own_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    kind, alone = "deepseek_v3", PassContext(1)
    model, name = double(kind), "model.layers.2.embed_tokens.weight"
    drafter = captured(kind)[1].bodies["replicated"]
    held = drafter.get_parameter("embed_tokens.weight")
    assert torch.equal(held, OWN_TABLE) and not torch.equal(held, model.get_input_embeddings().weight)
    save_file({n: x.contiguous() for n, x in on_disk(kind).items()}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"{name} of {tmp_path}: found no such tensor, required \[64, 32\]"):
        load_mtp(model, tmp_path, ctx=alone, own_embedding=True)
    with pytest.raises(ConfigError, match=rf"{name} of the tensors given: found \[3, 32\]"):
        load_mtp(model, on_disk(kind) | {name: OWN_TABLE[:3]}, ctx=alone, own_embedding=True)


def test_a_block_drafter_reads_an_embedding_of_its_own(tmp_path: Path) -> None:
    config = DSparkConfig(steps.VOCAB, 16, 1, 2, 2, 8, 32, (0, 1), 3, 5, 4)
    stored = DSpark(config).own_tensors()
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    table, head = torch.zeros(steps.VOCAB, 16), torch.ones(steps.VOCAB, 16)
    save_file(stored, tmp_path / "model.safetensors")
    assert not load_dspark(tmp_path, table, head).embed_tokens.weight.any()
    with pytest.raises(ConfigError, match=rf"embed_tokens.weight of {tmp_path}: found no such tensor"):
        load_dspark(tmp_path, table, head, own_embedding=True)
    save_file(stored | {"embed_tokens.weight": table + 2}, tmp_path / "model.safetensors")
    assert torch.equal(load_dspark(tmp_path, table, head, own_embedding=True).embed_tokens.weight, table + 2)
