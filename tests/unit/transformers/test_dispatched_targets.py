# SPDX-License-Identifier: Apache-2.0
"""Mixture-of-experts models of transformers on DP=2 x PCP=2 with experts of four ranks, against experts at hand.

Float64; relative to the largest hidden state. Measured: clean at most 3e-15; with one rank's experts exchanged at
least 0.4.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from pcp_passes.engine.bodies import Model
from pcp_passes.engine.expert_shards import expert_layers, shard_experts
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.transformers import load_target
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.peer_rows import PeerRows
from pcp_passes.paged import AttentionInputs, running
from pcp_passes.passes import PassContext
from pcp_passes.simulate import simulate
from pcp_passes.speculative.plain import NoDrafter
from pcp_passes.step import StepProgram, ops
from tests import steps
from tests.unit.transformers import tiny
from tests.unit.transformers.steps import Requests

CLEAN, FAULT = 1e-12, 1e-3
MESH = Mesh(dp=2, pcp=2)
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 2, "decoder_sparse_step": 1},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
}
MODELS = {"deepseek_v3": 1, "glm_moe_dsa": 2, "glm4_moe": 1, "qwen3_moe": 2, "mixtral": 2}
"""How many layers with experts each has; the last has a rank without any."""


@functools.cache
def target(name: str) -> Model:
    from transformers import AutoConfig, AutoModelForCausalLM

    known = tiny.MODELS | tiny.SPARSE | tiny.GROUPED | MORE
    config = AutoConfig.for_model(name, **{**tiny._COMMON, **known[name]})
    model = tiny.randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    return load_target(model.double(), ctx=PassContext(MESH.pcp))


class Replicas:
    """Two replicas with requests of their own; the second has fewer."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.sharing = model.over(PassContext(MESH.pcp), dp=MESH.dp)
        lengths = (23, 9), (6,)
        self.requests = [
            Requests([tiny.tokens(n, seed=10 * replica + i)[0] for i, n in enumerate(given)])
            for replica, given in enumerate(lengths)
        ]
        self.alone = [held.caches() for held in self.requests]
        self.ranks = [self.requests[rank // MESH.pcp].caches() for rank in range(MESH.world_size)]
        for rank, caches in enumerate(self.ranks):
            caches.experts = shard_experts(self.sharing, rank, MESH.ep)

    def step(self, rows: Any, *, sharded: bool) -> float:
        """Runs a step on all ranks, and on each replica alone; the largest difference."""
        steps = [held.next(count) for held, count in zip(self.requests, rows, strict=True)]
        wanted = [
            step.run(self.model.bodies["replicated"], caches) for step, caches in zip(steps, self.alone, strict=True)
        ]
        arguments: list[list[torch.Tensor]] = []
        inputs: list[AttentionInputs] = []
        restores: list[torch.Tensor] = []
        for step in steps:
            if sharded:
                given, held, restore = step.sharded(MESH.pcp)
            else:
                held, restore = [step.inputs()] * MESH.pcp, torch.arange(len(step.ids))
                given = [[step.ids, step.positions]] * MESH.pcp
            arguments, inputs, restores = arguments + given, inputs + held, [*restores, restore]
        told = tuple(inputs[MESH.pcp * replica].rows for replica in range(MESH.dp))
        for rank, caches in enumerate(self.ranks):
            caches.peers = PeerRows(told, (1,) * MESH.dp, rank // MESH.pcp)
        with torch.no_grad():
            outputs = simulate(
                self.sharing.bodies["sharded" if sharded else "replicated"], arguments,
                rank_context=lambda rank: running(self.ranks[rank], inputs[rank]),
                groups={axis: MESH.groups(axis) for axis in ("dp", "pcp")},
            )  # fmt: skip
        worst = 0.0
        for replica, required in enumerate(wanted):
            mine = outputs[MESH.pcp * replica : MESH.pcp * (replica + 1)]
            if sharded:
                worst = max(worst, tiny.error(torch.cat(mine)[restores[replica]], required))
                continue
            assert all(torch.equal(other, mine[0]) for other in mine), "the same bits on all PCP ranks"
            worst = max(worst, tiny.error(mine[0], required))
        return worst

    def caches_differ(self) -> float:
        pairs = [
            (held, alone.tensors[name])
            for rank, caches in enumerate(self.ranks)
            for alone in [self.alone[rank // MESH.pcp]]
            for name, held in caches.tensors.items()
        ]
        return max(float((held - wanted).abs().max()) for held, wanted in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_equals_experts_at_hand(name: str) -> None:
    world = Replicas(target(name))
    bodies = world.sharing.bodies
    assert len(expert_layers(bodies["sharded"])) == len(expert_layers(bodies["replicated"])) == MODELS[name]
    own = "mlp.experts." if name != "mixtral" else "experts."
    assert not [key for key in bodies["sharded"].state_dict() if own in key], "experts left the body"
    assert world.step(((9, 4), (3,)), sharded=True) < CLEAN
    assert world.step(((13, 1), (1,)), sharded=True) < CLEAN
    assert world.step(((1, 1), (2,)), sharded=False) < CLEAN
    assert world.caches_differ() < CLEAN * 100


def test_another_ranks_experts_are_seen() -> None:
    world = Replicas(target("qwen3_moe"))
    world.ranks[1].experts = world.ranks[0].experts
    assert world.step(((9, 4), (3,)), sharded=True) > FAULT


def test_a_program_dispatches_and_keeps_its_records() -> None:
    whole = StepProgram(target("deepseek_v3"), NoDrafter(), pcp=MESH.pcp)
    sharing = whole.dispatching(MESH.dp)
    assert sharing.target.dp == 2 and sharing.fingerprint != whole.fingerprint
    assert expert_layers(sharing.target.bodies["sharded"]) == ("target.decoder.layers.1.mlp.experts",)
    assert not [key for key in sharing.plain.state_dict() if "mlp.experts." in key]
    narrow = sharing.storing("bf16")
    assert (narrow.target.dp, narrow.target.store) == (2, "bf16")
    assert whole.storing("bf16").dispatching(MESH.dp).fingerprint == narrow.fingerprint
    assert whole.dispatching(1).target.dp == 1, "over the PCP axis alone"
    dense = steps.program(2)
    assert dense.dispatching(2) is dense
    alone = StepProgram(target("deepseek_v3").over(PassContext(1)), NoDrafter(), pcp=1)
    assert alone.dispatching(1) is alone
    with pytest.raises(ConfigError, match="shared by 0 replicas"):
        whole.dispatching(0)


def test_draft_queries_state_their_rows_per_request() -> None:
    for made, wanted in ((steps.program(1), [0, 1, 1]), (steps.block_program(1), [0, 3])):
        calls = [node for node in made.plain.graph.nodes if ops.is_op(node, ops.attention_inputs)]
        assert [node.args[6] if len(node.args) > 6 else 0 for node in calls] == wanted
