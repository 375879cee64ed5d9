# SPDX-License-Identifier: Apache-2.0
"""The shipped tiny checkpoints: they load in transformers, draft well, and stay small.

Acceptance is measured by a loop that shares no code with the training or the engine: no cache, everything recomputed
for every token, the MTP layer run as a fifth decoder layer of transformers' own model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pcp_passes.demo.checkpoints import BLOCK_DRAFTER, TARGET, checkpoint
from pcp_passes.demo.text import BEGIN, END, VOCABULARY, held_out_prompts
from pcp_passes.errors import ConfigError
from pcp_passes.paged import AttentionInputs, PagedCaches, running
from pcp_passes.speculative.dspark_model import DSpark, load_dspark

pytestmark = pytest.mark.unit
pytest.importorskip("transformers")

PROMPT, NEW = 320, 24
# Measured on the two prompts of Python 3.11: 2.56 and 2.58 tokens a round. A damaged MTP layer has 1.3, a block drafter
# without context 1.4; other releases of Python have slightly other prompts.
MTP_FLOOR, BLOCK_FLOOR = 2.3, 2.2


@dataclass
class Target:
    """transformers' model with the MTP layer as one decoder layer too many, and what that layer has besides."""

    causal: nn.Module
    extras: dict[str, Tensor]

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """Normed states [n, C] of ids i64[n]."""
        return self.causal.model(ids[None], use_cache=False).last_hidden_state[0]

    @torch.no_grad()
    def outputs_of(self, layers: tuple[int, ...], ids: Tensor) -> tuple[Tensor, ...]:
        """Outputs [n, C] of decoder layers, counted from 0."""
        seen: dict[int, Tensor] = {}
        hooks = [
            self.causal.model.layers[layer].register_forward_hook(
                lambda _module, _inputs, output, layer=layer: seen.update({layer: output[0][0]})
            )
            for layer in layers
        ]
        self.states(ids)
        for hook in hooks:
            hook.remove()
        return tuple(seen[layer] for layer in layers)

    @torch.no_grad()
    def logits(self, states: Tensor) -> Tensor:
        return self.causal.lm_head(states)

    def greedy(self, ids: Tensor) -> Tensor:
        """What follows each token, i64[n]."""
        return self.logits(self.states(ids)).argmax(-1)

    @torch.no_grad()
    def mtp(self, ids: Tensor, states: Tensor) -> Tensor:
        """State [C] after the last row, from rows (states[t], ids[t + 1]) at positions t."""
        model, count = self.causal.model, states.shape[0]
        embedded = model.embed_tokens(ids[1 : count + 1]).clone()
        embedded[0] = 0
        both = torch.cat([self._norm("enorm", embedded), self._norm("hnorm", states)], -1)
        x = (both @ self.extras["eh_proj.weight"].T)[None]
        positions = torch.arange(count)[None]
        mask = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
        rope = model.rotary_emb(x, position_ids=positions)
        x, _ = model.layers[4](x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        return self._norm("shared_head.norm", x[0, -1])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        eps = self.causal.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.extras[f"{name}.weight"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    from transformers import GlmMoeDsaForCausalLM

    folder, widened = checkpoint(TARGET), tmp_path_factory.mktemp("five layers")
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    for name, value in (("indexer_types", "full"), ("mlp_layer_types", "sparse"), ("layer_types", "indexed_attention")):
        config[name].append(value)
    (widened / "config.json").write_text(json.dumps(config))
    (widened / "model.safetensors").symlink_to(folder / "model.safetensors")
    causal = GlmMoeDsaForCausalLM.from_pretrained(widened, dtype=torch.float32).eval()
    # The fifth layer is there with its weights, and out of the target's way.
    causal.config.num_hidden_layers = 4
    tensors = load_file(folder / "model.safetensors")
    names = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
    return Target(causal, {name: tensors[f"model.layers.4.{name}"].float() for name in names})


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    """Two held-out pieces whose continuations are text, not repetition: a source file and its comments."""
    return [held_out_prompts(12, PROMPT)[number] for number in (7, 9)]


def speculate(target: Target, prompt: Tensor, drafts_of, new: int = NEW) -> tuple[Tensor, list[int]]:
    """Continue ``prompt`` greedily; ``drafts_of(ids, states)`` proposes what follows ``ids``, the newest verified last.

    Returns the sequence and the accepted drafts of each round.
    """
    ids = torch.cat([prompt, target.greedy(prompt)[-1:]])
    accepted = []
    while len(ids) < len(prompt) + new:
        drafts = drafts_of(ids, target.states(ids[:-1]))
        verified = target.greedy(torch.cat([ids, drafts]))[len(ids) - 1 :]
        right = int((drafts == verified[:-1]).int().cumprod(0).sum())
        ids = torch.cat([ids, verified[: right + 1]])
        accepted.append(right)
    return ids, accepted


def mtp_drafts(target: Target, steps: int):
    def drafts_of(ids: Tensor, states: Tensor) -> Tensor:
        for _ in range(steps):
            state = target.mtp(ids, states)
            ids = torch.cat([ids, target.logits(state).argmax(-1, keepdim=True)])
            states = torch.cat([states, state[None]])
        return ids[-steps:]

    return drafts_of


def tokens_per_round(accepted: list[int]) -> float:
    return 1 + sum(accepted) / len(accepted)


@pytest.mark.parametrize("name", [TARGET, BLOCK_DRAFTER])
def test_it_is_small(name: str) -> None:
    sizes = {path.name: path.stat().st_size for path in checkpoint(name).iterdir()}
    assert sum(sizes.values()) <= (4 if name == TARGET else 1) * 2**20, sizes
    assert {"config.json", "model.safetensors", "README.md"} <= sizes.keys()


def test_a_missing_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no checkpoint 'tiny-other' in .*examples/checkpoints.*clone"):
        checkpoint("tiny-other")


def test_transformers_loads_the_target_as_published() -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint(TARGET), dtype=torch.float32)
    config = model.config
    assert (config.model_type, config.num_hidden_layers, config.num_nextn_predict_layers) == ("glm_moe_dsa", 4, 1)
    assert (config.vocab_size, config.bos_token_id, config.eos_token_id) == (VOCABULARY, BEGIN, END)
    prompt = held_out_prompts(4, 200)
    with torch.no_grad():
        logits = model(prompt[:, :-1]).logits
    assert logits.isfinite().all()
    nats = nn.functional.cross_entropy(logits[:, 100:].flatten(0, 1), prompt[:, 101:].flatten())
    # xz needs 1.96 bits a byte for this text, an untrained model eight; this one 1.8 over longer windows.
    assert nats.item() / 0.6931 < 2.4


def test_the_mtp_layer_has_its_published_names(target: Target) -> None:
    tensors = load_file(checkpoint(TARGET) / "model.safetensors")
    stored = {name for name in tensors if name.startswith("model.layers.4.")}
    assert not {name for name in stored if "shared_head.head" in name}
    assert torch.equal(tensors["model.layers.4.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert {f"model.layers.4.mlp.experts.{number}.down_proj.weight" for number in range(8)} <= stored
    assert "model.layers.4.self_attn.indexer.weights_proj.weight" in stored


def test_mtp_drafts_are_accepted(target: Target, prompts: list[Tensor]) -> None:
    rounds: list[int] = []
    for prompt in prompts:
        ids, accepted = speculate(target, prompt, mtp_drafts(target, 3))
        plain, _ = speculate(target, prompt, lambda ids, states: ids[:0])
        shared = min(len(ids), len(plain))
        assert torch.equal(ids[:shared], plain[:shared])
        rounds += accepted
    assert tokens_per_round(rounds) >= MTP_FLOOR, rounds


def test_a_damaged_mtp_layer_is_seen(target: Target, prompts: list[Tensor]) -> None:
    swapped = target.extras | {"eh_proj.weight": target.extras["eh_proj.weight"].roll(128, 1)}
    _, accepted = speculate(target, prompts[0], mtp_drafts(Target(target.causal, swapped), 3))
    assert tokens_per_round(accepted) < MTP_FLOOR - 0.5, accepted


# The block drafter.


@pytest.fixture(scope="module")
def drafter(target: Target) -> DSpark:
    model = target.causal
    return load_dspark(checkpoint(BLOCK_DRAFTER), model.model.embed_tokens.weight, model.lm_head.weight)


def block(drafter: DSpark, anchor: Tensor, position: int, steps: int) -> tuple[Tensor, Tensor]:
    """ids and positions i64[steps] of a block that begins with ``anchor`` at ``position``."""
    ids = torch.full((steps,), drafter.config.mask_token_id)
    ids[0] = anchor
    return ids, torch.arange(position, position + steps)


def dense(context: list[tuple[Tensor, Tensor]]):
    """Attention of one block over ``context`` and itself, written with nothing of the library."""

    def attend(number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = torch.cat([context[number][0], k]), torch.cat([context[number][1], v])
        scores = torch.einsum("nhd,mhd->hnm", q, keys) / q.shape[-1] ** 0.5
        return torch.einsum("hnm,mhd->nhd", scores.softmax(-1), values)

    return attend


def sequential(drafter: DSpark, hidden: Tensor, anchor: Tensor, markov: bool = True) -> Tensor:
    """Greedy drafts of a block's states."""
    tokens = [anchor.reshape(1)]
    for state in hidden:
        bias = drafter.markov_head(tokens[-1]) if markov else 0
        tokens.append((drafter.logits(state[None]) + bias).argmax(-1))
    return torch.cat(tokens[1:])


def block_drafts(target: Target, drafter: DSpark, steps: int, *, context: bool = True, markov: bool = True):
    def drafts_of(ids: Tensor, states: Tensor) -> Tensor:
        verified = ids[:-1] if context else ids[:1]
        aux = target.outputs_of(drafter.config.target_layer_ids, verified)
        known = drafter.context_keys_values(aux, torch.arange(len(verified)))
        query, positions = block(drafter, ids[-1], len(ids) - 1, steps)
        return sequential(drafter, drafter.query(query, positions, dense(known)), ids[-1], markov)

    return drafts_of


def test_block_drafts_are_accepted(target: Target, drafter: DSpark, prompts: list[Tensor]) -> None:
    rounds: list[int] = []
    for prompt in prompts:
        ids, accepted = speculate(target, prompt, block_drafts(target, drafter, 5))
        plain, _ = speculate(target, prompt, lambda ids, states: ids[:0])
        shared = min(len(ids), len(plain))
        assert torch.equal(ids[:shared], plain[:shared])
        rounds += accepted
    assert tokens_per_round(rounds) >= BLOCK_FLOOR, rounds


def test_without_its_context_it_drafts_worse(target: Target, drafter: DSpark, prompts: list[Tensor]) -> None:
    _, accepted = speculate(target, prompts[0], block_drafts(target, drafter, 5, context=False))
    assert tokens_per_round(accepted) < BLOCK_FLOOR - 0.3, accepted


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_over_a_paged_cache_it_gives_the_same_states(
    target: Target, drafter: DSpark, prompts: list[Tensor], steps: int
) -> None:
    """Two requests, contexts written in chunks, the second one after a block that was rejected as a whole."""
    expected, got = dense_and_paged(target, drafter, prompts, steps, context_is_rewritten=True)
    assert expected.shape == (2 * steps, drafter.config.hidden_size)
    assert torch.allclose(expected, got, rtol=0, atol=1e-11), (expected - got).abs().max()


def test_a_context_that_a_rejected_block_overwrote_is_seen(
    target: Target, drafter: DSpark, prompts: list[Tensor]
) -> None:
    expected, got = dense_and_paged(target, drafter, prompts, 3, context_is_rewritten=False)
    assert torch.allclose(expected[:3], got[:3], rtol=0, atol=1e-11)
    assert not torch.allclose(expected[3:], got[3:], rtol=0, atol=1e-3)


def dense_and_paged(
    target: Target, drafter: DSpark, prompts: list[Tensor], steps: int, *, context_is_rewritten: bool
) -> tuple[Tensor, Tensor]:
    """States f64[2 * steps, C] of one block of each of two requests, by dense attention and over a paged cache."""
    model = target.causal
    double = load_dspark(
        checkpoint(BLOCK_DRAFTER), model.model.embed_tokens.weight, model.lm_head.weight, torch.float64
    )
    lengths, size = (37, 52), 16
    tables = torch.tensor([[7, 2, 5, 0], [1, 6, 3, 4]])
    caches = PagedCaches(num_blocks=8, block_size=size, dtype=torch.float64)
    aux = [
        tuple(state.double() for state in target.outputs_of(double.config.target_layer_ids, prompt[:length]))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]

    def inputs(rows: list[tuple[int, int, int]]) -> AttentionInputs:
        """Rows (request, first position, end position)."""
        positions = torch.cat([torch.arange(first, end) for _, first, end in rows])
        owner = torch.cat([torch.full((end - first,), request) for request, first, end in rows])
        counts = torch.tensor([0] + [end - first for _, first, end in rows])
        slots = tables[owner, positions // size] * size + positions % size
        ends = torch.tensor([end for _, _, end in rows])
        return AttentionInputs(
            slots, "replicated", tables[[request for request, _, _ in rows]], counts.cumsum(0), ends, positions
        )

    def write(request: int, first: int, end: int) -> None:
        with running(caches, inputs([(request, first, end)])):
            double.context(tuple(state[first:end] for state in aux[request]), torch.arange(first, end))

    def query(request: int, anchor: int) -> None:
        ids, positions = block(double, prompts[request][anchor], anchor, steps)
        with running(caches, inputs([(request, anchor, anchor + steps)])):
            double.query(ids, positions)

    write(0, 0, 20)
    write(0, 20, lengths[0])
    write(1, 0, lengths[1] - steps)
    query(1, lengths[1] - steps)
    if context_is_rewritten:
        write(1, lengths[1] - steps, lengths[1])

    expected, ids, positions = [], [], []
    for prompt, length, states in zip(prompts, lengths, aux, strict=True):
        one, where = block(double, prompt[length], length, steps)
        known = double.context_keys_values(states, torch.arange(length))
        expected.append(double.query(one, where, dense(known)))
        ids.append(one)
        positions.append(where)
    with running(caches, inputs([(request, length, length + steps) for request, length in enumerate(lengths)])):
        got = double.query(torch.cat(ids), torch.cat(positions))
    return torch.cat(expected), got


def test_another_target_is_refused(target: Target) -> None:
    weight = target.causal.lm_head.weight
    with pytest.raises(ConfigError, match=r"its embedding is \[264, 128\], the target's \[264, 64\]"):
        load_dspark(checkpoint(BLOCK_DRAFTER), weight[:, :64], weight)
    with pytest.raises(ConfigError, match=r"architectures is \['GlmMoeDsaForCausalLM'\]"):
        load_dspark(checkpoint(TARGET), weight, weight)


def test_an_incomplete_drafter_is_refused(target: Target, tmp_path: Path) -> None:
    weight = target.causal.lm_head.weight
    config = json.loads((checkpoint(BLOCK_DRAFTER) / "config.json").read_text())
    (tmp_path / "model.safetensors").symlink_to(checkpoint(BLOCK_DRAFTER) / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"markov_rank": 16}))
    with pytest.raises(ConfigError, match=r"markov_head.markov_w1.weight: found \(264, 32\), required \(264, 16\)"):
        load_dspark(tmp_path, weight, weight)
    del config["block_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="lacks block_size"):
        load_dspark(tmp_path, weight, weight)
