# SPDX-License-Identifier: Apache-2.0
"""A byte-level GLM-MoE-DSA of 1.9 M parameters with its MTP layer, in the form that training needs.

The weights sit in the modules of transformers, so what is saved loads there. The forward passes are written out,
because training wants three things that those of transformers lack: index scores with a gradient, attention without
a selection, and the MTP layer.

Shapes: B sequences, S tokens, H heads, D head size, C hidden size. All weights and states are f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as hf

from pcp_passes.demo.text import BEGIN, END, FILLER, VOCABULARY

Rope = tuple[Tensor, Tensor]
LOWEST = torch.finfo(torch.float32).min
AUX_LAYERS = (0, 2, 3)
"""Target layers whose output the block drafter reads (0-based)."""


def tiny_config() -> GlmMoeDsaConfig:
    """One dense and three mixture layers, two with an indexer, and one MTP layer."""
    return GlmMoeDsaConfig(
        architectures=["GlmMoeDsaForCausalLM"],
        vocab_size=VOCABULARY, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=FILLER,
        hidden_size=128, num_hidden_layers=4, num_nextn_predict_layers=1,
        first_k_dense_replace=1, intermediate_size=384,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=96,
        routed_scaling_factor=2.5,
        # Equal sizes of keys and values keep scaled_dot_product_attention on its fast path on a CPU.
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=64, kv_lora_rank=64,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
        index_n_heads=4, index_head_dim=32, index_topk=64, index_topk_freq=4, index_skip_topk_offset=2,
        max_position_embeddings=8192, initializer_range=0.05,
        # So small a base turns every angle fully within the trained lengths: longer contexts bring no unseen ones.
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip


class Mtp(nn.Module):
    """The layer after the last: from the state of t and token t+1, the state that predicts token t+2."""

    def __init__(self, config: GlmMoeDsaConfig):
        super().__init__()
        self.enorm = hf.GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = hf.GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        one_more = config.to_dict() | {
            "num_hidden_layers": config.num_hidden_layers + 1,
            "indexer_types": [*config.indexer_types, "full"],
            "mlp_layer_types": [*config.mlp_layer_types, "sparse"],
            "layer_types": [*config.layer_types, "indexed_attention"],
        }
        self.block = hf.GlmMoeDsaDecoderLayer(GlmMoeDsaConfig.from_dict(one_more), config.num_hidden_layers)
        self.head_norm = hf.GlmMoeDsaRMSNorm(config.hidden_size, config.rms_norm_eps)


class TinyGlm(nn.Module):
    """Target and MTP layer, freshly initialised."""

    def __init__(self, config: GlmMoeDsaConfig):
        super().__init__()
        self.config = config
        self.main = GlmMoeDsaForCausalLM(config)
        self.mtp = Mtp(config)
        for module in self.mtp.modules():
            self.main._init_weights(module)
        # With embeddings as small as the other weights, attention drowns them: every token looks alike to the routers.
        nn.init.normal_(self.main.model.embed_tokens.weight, std=0.2)
        shrink = (2 * (config.num_hidden_layers + 1)) ** -0.5
        for name, parameter in self.named_parameters():
            if name.removesuffix(".weight").endswith(("o_proj", "down_proj")):
                parameter.data *= shrink

    def embed(self, tokens: Tensor) -> Tensor:
        return self.main.model.embed_tokens(tokens)

    def rope(self, positions: Tensor) -> Rope:
        """cos and sin [1, S, rope size] at positions i64[S]."""
        return self.main.model.rotary_emb(self.main.lm_head.weight, positions[None])

    def logits(self, hidden: Tensor) -> Tensor:
        return self.main.lm_head(hidden)


@dataclass
class Heads:
    """What a layer computes per token before it looks at others: q, k, v [B, H, S, D], latent [B, S, q rank]."""

    q: Tensor
    k: Tensor
    v: Tensor
    latent: Tensor


@dataclass
class IndexHeads:
    """The indexer's q [B, S, H, D], key [B, S, D] and head weights [B, S, H], every constant factor folded in."""

    q: Tensor
    key: Tensor
    weight: Tensor


def heads(attention: Any, x: Tensor, rope: Rope) -> Heads:
    """``x`` [B, S, C], normed."""
    nope, rotary = attention.qk_nope_head_dim, attention.qk_rope_head_dim
    latent = attention.q_a_layernorm(attention.q_a_proj(x))
    q = attention.q_b_proj(latent).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
    q_plain, q_turned = q.split([nope, rotary], -1)
    compressed, k_turned = attention.kv_a_proj_with_mqa(x).split([attention.kv_lora_rank, rotary], -1)
    kv = attention.kv_b_proj(attention.kv_a_layernorm(compressed)).unflatten(-1, (attention.num_heads, -1))
    k_plain, v = kv.transpose(1, 2).split([nope, attention.v_head_dim], -1)
    q_turned, k_turned = hf.apply_rotary_pos_emb_interleave(q_turned, k_turned[:, None], *rope)
    k = torch.cat([k_plain, k_turned.expand(-1, attention.num_heads, -1, -1)], -1)
    return Heads(torch.cat([q_plain, q_turned], -1), k, v, latent)


def index_heads(indexer: Any, x: Tensor, latent: Tensor, rope: Rope) -> IndexHeads:
    rotary = indexer.qk_rope_head_dim
    q = indexer.wq_b(latent).unflatten(-1, (indexer.n_heads, -1))
    key = indexer.k_norm(indexer.wk(x)).unsqueeze(2)
    q_turned, key_turned = hf.apply_rotary_pos_emb_interleave(
        q[..., :rotary], key[..., :rotary], *rope, unsqueeze_dim=2
    )
    # relu commutes with positive factors, so the score scale joins the weights.
    weight = indexer.weights_proj(x) * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    key = torch.cat([key_turned, key[..., rotary:]], -1).squeeze(2)
    return IndexHeads(torch.cat([q_turned, q[..., rotary:]], -1), key, weight)


def index_scores(q: Tensor, weight: Tensor, key: Tensor) -> Tensor:
    """[B, S, T] of queries against keys [B, T, D]."""
    return torch.einsum("bsh,bhst->bst", weight, torch.einsum("bshd,btd->bhst", q, key).relu())


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """bool like ``scores`` [B, S, T]: the ``count`` highest of the allowed ones, all where there are fewer."""
    chosen = scores.masked_fill(~allowed, LOWEST).topk(min(count, scores.shape[-1]), -1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True) & allowed


def experts(module: Any, x: Tensor) -> Tensor:
    """The mixture of a layer; rows sorted by expert, so that each expert is one product."""
    rows = x.flatten(0, -2)
    _, weight, choice = module.gate(rows)
    order = choice.flatten().argsort()
    owner = order // choice.shape[1]
    counts = torch.bincount(choice.flatten(), minlength=module.gate.num_experts).tolist()
    parts = []
    for number, part in enumerate(rows[owner].split(counts)):
        gate, up = F.linear(part, module.experts.gate_up_proj[number]).chunk(2, -1)
        parts.append(F.linear(F.silu(gate) * up, module.experts.down_proj[number]))
    routed = torch.zeros_like(rows).index_add(0, owner, torch.cat(parts) * weight.flatten()[order, None])
    return routed.view_as(x) + module.shared_experts(x)


def finish(layer: Any, x: Tensor, attended: Tensor) -> Tensor:
    """The rest of a layer after attention [B, H, S, D]: output projection and feed-forward, with both residuals."""
    x = x + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
    normed = layer.post_attention_layernorm(x)
    return x + (experts(layer.mlp, normed) if hasattr(layer.mlp, "experts") else layer.mlp(normed))


def trunk(model: TinyGlm, tokens: Tensor, sparse: bool = True, aux: list[Tensor] | None = None) -> Tensor:
    """Normed states [B, S, C] of tokens i64[B, S]: what the head, the MTP layer and nothing else reads.

    Args:
        model: the target.
        tokens: i64[B, S].
        sparse: attend to what the indexers select, else to everything.
        aux: receives the outputs of :data:`AUX_LAYERS`.
    """
    x, rope, everything, keep = (
        model.embed(tokens),
        model.rope(torch.arange(tokens.shape[1])),
        causal(tokens.shape[1]),
        None,
    )
    for number, layer in enumerate(model.main.model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        h = heads(attention, normed, rope)
        if sparse and attention.indexer is not None:
            with torch.no_grad():
                i = index_heads(attention.indexer, normed, h.latent, rope)
                keep = best(index_scores(i.q, i.weight, i.key), everything, model.config.index_topk)[:, None]
        attended = F.scaled_dot_product_attention(
            h.q, h.k, h.v, attn_mask=keep, is_causal=keep is None, scale=attention.scaling
        )
        x = finish(layer, x, attended)
        if aux is not None and number in AUX_LAYERS:
            aux.append(x)
    return model.main.model.norm(x)


def mtp_input(model: TinyGlm, tokens: Tensor, states: Tensor, first: bool) -> Tensor:
    """[B, S, C] of the MTP layer from the next tokens and the states; position 0 has no token embedding."""
    embedded = model.embed(tokens)
    if first:
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], 1)
    return model.mtp.eh_proj(torch.cat([model.mtp.enorm(embedded), model.mtp.hnorm(states)], -1))


def drafts(model: TinyGlm, tokens: Tensor, states: Tensor, steps: int, sparse: bool) -> list[Tensor]:
    """States of ``steps`` recursive drafts from every position at once, each [B, S - steps, C].

    Column t of entry k (from 0) predicts token t+2+k, had all drafts before it been right. Its query stands at
    position t+k and sees what a cached decoder sees there: the slots 0..t of the first step, which hold verified
    tokens, and one slot of its own from each later step, k included.
    """
    length = tokens.shape[1] - steps
    block, attention = model.mtp.block, model.mtp.block.self_attn
    state, results = states[:, :length], []
    keys, values, index_keys = [], [], []  # one entry per step; the first is shared by all columns
    allowed = causal(length)
    for step in range(steps):
        rope = model.rope(torch.arange(length) + step)
        x = mtp_input(model, tokens[:, step + 1 : step + 1 + length], state, first=step == 0)
        normed = block.input_layernorm(x)
        h = heads(attention, normed, rope)
        keys.append(h.k)
        values.append(h.v)
        if step:
            allowed = torch.cat([allowed, torch.ones(length, 1, dtype=torch.bool)], 1)
        keep = allowed
        if sparse:
            with torch.no_grad():
                i = index_heads(attention.indexer, normed, h.latent, rope)
                index_keys.append(i.key)
                scores = [index_scores(i.q, i.weight, index_keys[0])]
                for key in index_keys[1:]:
                    own = torch.einsum("bshd,bsd->bsh", i.q, key).relu()
                    scores.append((own * i.weight).sum(-1, keepdim=True))
                keep = best(torch.cat(scores, -1), allowed, model.config.index_topk)[:, None]
        attended = _attend(h.q, keys, values, keep, attention.scaling)
        state = model.mtp.head_norm(finish(block, x, attended))
        results.append(state)
    return results


def _attend(q: Tensor, keys: list[Tensor], values: list[Tensor], keep: Tensor, scale: float) -> Tensor:
    """Attention over the first step's slots, all of them, and each query's own slot of every later step."""
    if len(keys) == 1:
        return F.scaled_dot_product_attention(q, keys[0], values[0], attn_mask=keep, scale=scale)
    columns = [q @ keys[0].mT] + [(q * key).sum(-1, keepdim=True) for key in keys[1:]]
    weight = (torch.cat(columns, -1) * scale).masked_fill(~keep, LOWEST).softmax(-1)
    shared = keys[0].shape[-2]
    out = weight[..., :shared] @ values[0]
    for number, value in enumerate(values[1:], start=shared):
        out = out + weight[..., number : number + 1] * value
    return out
