# SPDX-License-Identifier: Apache-2.0
"""A DSpark-style block drafter: one pass over K query tokens drafts K tokens, each seeing the target's own states.

Its context is not text but what some layers of the target computed for it: those states are projected to one, and that
one to keys and values of each drafter layer (:meth:`DSpark.context`). A block of queries (:meth:`DSpark.query`) is the
newest verified token, the anchor, followed by K - 1 mask tokens; they see the whole context and each other, in both
directions, and the query at position p stands for the token at p + 1. A Markov head then adds to each position's
logits what the token drafted before it makes likely, which is the only sequential part.

Names of parameters and of the configuration's entries are those of published Qwen3 DSpark checkpoints. Embedding and
head are the target's, so a checkpoint holds neither.

Shapes: N rows, H heads, D head size, C hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pcp_passes.errors import ConfigError
from pcp_passes.paged.ops import kv_attend, kv_write

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer number, q, k, v [N, H, D]) -> [N, H, D]: attention of a block, which sees its context and its own k and v."""

ARCHITECTURE = "Qwen3DSparkModel"
SHARED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class DSparkConfig:
    """The entries of ``config.json`` that the model reads.

    Attributes:
        target_layer_ids: target layers, from 0, whose outputs are the context; the last one's is before the final norm.
        mask_token_id: stands for a token that is not known yet.
        block_size: query tokens that it was trained with, the most that it should be asked for.
        markov_rank: width of the Markov head.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    markov_rank: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @classmethod
    def read(cls, folder: Path) -> DSparkConfig:
        """From ``folder/config.json``. Raises :class:`ConfigError` for another architecture or a missing entry."""
        entries = json.loads((folder / "config.json").read_text())
        if entries.get("architectures") != [ARCHITECTURE]:
            raise ConfigError(
                f"{folder} is no block drafter: architectures is {entries.get('architectures')}, required "
                f"[{ARCHITECTURE!r}]. Next: name the drafter's folder, not the target's"
            )
        missing = sorted(name for name in cls.__dataclass_fields__ if name not in entries)
        if missing:
            raise ConfigError(f"{folder / 'config.json'} lacks {', '.join(missing)}. Next: use a complete checkpoint")
        chosen: dict[str, Any] = {name: entries[name] for name in cls.__dataclass_fields__}
        return cls(**chosen | {"target_layer_ids": tuple(chosen["target_layer_ids"])})

    def to_json(self) -> dict[str, Any]:
        """What ``config.json`` holds, the architecture included."""
        return {"architectures": [ARCHITECTURE], "model_type": "qwen3"} | asdict(self)


class Norm(nn.Module):
    """x / rms(x) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    """Projections of a layer, its normed heads and their rotation; what is attended to is the caller's business."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.head_dim, self.theta = config.head_dim, config.rope_theta
        self.q_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(size, config.hidden_size, bias=False)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """[N, C] -> [N, H, D]."""
        return self._turn(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), positions)

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[N, C] -> two [N, KV heads, D]; rows of the context and of a block alike."""
        k = self._turn(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), positions)
        return k, self.v_proj(x).unflatten(-1, (-1, self.head_dim))

    def _turn(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.head_dim // 2
        # Angles in f64 whatever the model's type: at long positions f32 loses the fast frequencies' phase.
        steps = torch.arange(half, dtype=torch.float64, device=x.device) / half
        angles = positions.to(torch.float64)[:, None] * self.theta**-steps
        cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


class FeedForward(nn.Module):
    """The gated unit of Qwen3."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer over the rows of blocks."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, positions: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        normed = self.input_layernorm(x)
        attended = attend(self.self_attn.query(normed, positions), *self.self_attn.key_value(normed, positions))
        x = x + self.self_attn.o_proj(attended.flatten(1))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class MarkovHead(nn.Module):
    """Logits that the previous token alone gives, of low rank: i64[n] -> [n, V]."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, config.vocab_size, bias=False)

    def forward(self, previous: Tensor) -> Tensor:
        bias: Tensor = self.markov_w2(self.markov_w1(previous))
        return bias


class DSpark(nn.Module):
    """The drafter; :func:`load_dspark` makes one from a checkpoint and a target."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = MarkovHead(config)

    @property
    def cache_layers(self) -> tuple[str, ...]:
        """Names under which the layers' keys and values are cached."""
        return tuple(f"drafter.{number}" for number in range(len(self.layers)))

    def context_keys_values(self, aux: tuple[Tensor, ...], positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [N, KV heads, D] of each layer for context tokens.

        Args:
            aux: one [N, C] per entry of ``target_layer_ids``, in that order.
            positions: i64[N].
        """
        states = self.hidden_norm(self.fc(torch.cat(aux, -1)))
        attentions = [cast(Layer, layer).self_attn for layer in self.layers]
        return [attention.key_value(states, positions) for attention in attentions]

    def context(self, aux: tuple[Tensor, ...], positions: Tensor) -> Tensor:
        """Write the context's keys and values to the cache of the running call; the last write's token, [0]."""
        written = positions.new_empty(0)
        for name, (k, v) in zip(self.cache_layers, self.context_keys_values(aux, positions), strict=True):
            written = kv_write(k, v, name)
        return written

    def query(self, ids: Tensor, positions: Tensor, attend: Attend | None = None) -> Tensor:
        """States [N, C] of the rows of blocks, K rows a request; :meth:`logits` of them are the base logits.

        Args:
            ids: i64[N], each block the anchor and then ``mask_token_id``.
            positions: i64[N], each block's consecutive, the anchor's being that of the token.
            attend: attention; without it, that over the cache of the running call: the rows' own keys and values are
                written first (the context of a later step overwrites them), then every slot below the request's
                length is seen.
        """
        x = self.embed_tokens(ids)
        for number, layer in enumerate(self.layers):
            x = layer(x, positions, partial(attend or self._attend_cached, number))
        states: Tensor = self.norm(x)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, C] -> [N, V], without the Markov head."""
        out: Tensor = self.lm_head(hidden)
        return out

    def _attend_cached(self, number: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        name = self.cache_layers[number]
        written = kv_write(k, v, name)
        return kv_attend(q, written, name, scale=self.config.head_dim**-0.5, right=-1)

    def own_tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds: everything but the target's embedding and head."""
        return {name: tensor for name, tensor in self.state_dict().items() if name not in SHARED}


def load_dspark(
    folder: Path, embedding: Tensor, head: Tensor, dtype: torch.dtype | None = None, *, own_embedding: bool = False
) -> DSpark:
    """The drafter of a checkpoint on a target's embedding and head.

    Args:
        folder: with ``config.json`` and ``model.safetensors``.
        embedding: [V, C] of the target; shared, not copied, where ``dtype`` is its own.
        head: [V, C] of the target; likewise.
        dtype: of all parameters; the embedding's where left out.
        own_embedding: read ``embed_tokens.weight`` from the checkpoint; of ``embedding`` only shape, type and device
            are read then. For a drafter on the last of several pipeline stages, which has no table of the target.

    Raises:
        ConfigError: the configuration does not fit the target, or the file's tensors do not fit the configuration;
            ``own_embedding`` where the checkpoint has no table.
    """
    from safetensors.torch import load_file

    config = DSparkConfig.read(folder)
    required = (config.vocab_size, config.hidden_size)
    for what, tensor in (("embedding", embedding), ("head", head)):
        if tuple(tensor.shape) != required:
            raise ConfigError(
                f"the drafter in {folder} was made for another target: its {what} is {list(required)}, the target's "
                f"{list(tensor.shape)}. Next: use the target that it was trained on"
            )
    with torch.device("meta"):
        model = DSpark(config)
    stored = load_file(folder / "model.safetensors", device=str(embedding.device))
    table = stored.pop(SHARED[0], None) if own_embedding else embedding
    if table is None or tuple(table.shape) != required:
        found_table = "no such tensor" if table is None else f"{list(table.shape)}"
        raise ConfigError(
            f"the drafter needs an embedding of its own, {SHARED[0]} of {folder}: found {found_table}, required "
            f"{list(required)}. Use a checkpoint that has it, or run with pp=1, where the drafter reads the target's "
            "table"
        )
    expected = {name: tuple(tensor.shape) for name, tensor in model.own_tensors().items()}
    found = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        lines = "; ".join(f"{name}: found {found.get(name)}, required {expected.get(name)}" for name in wrong)
        raise ConfigError(f"tensors of {folder} do not fit its config.json: {lines}. Next: use a complete checkpoint")
    state = {name: tensor.to(dtype or embedding.dtype) for name, tensor in stored.items()}
    for name, tensor in zip(SHARED, (table, head), strict=True):
        state[name] = tensor.detach().to(dtype or embedding.dtype)
    model.load_state_dict(state, assign=True)
    return model.requires_grad_(False).eval()
