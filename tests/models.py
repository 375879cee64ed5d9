# SPDX-License-Identifier: Apache-2.0
"""Tiny random Hugging Face checkpoints on which context parallelism can go wrong visibly.

Random weights at the usual ``initializer_range`` make a language model that only looks at its last token: a
dropped gather would change nothing. Here every matrix is drawn with a standard deviation of ``gain / sqrt(fan_in)``
(0.1 to 0.3 at these sizes) and queries and keys a little wider, so that attention is peaked and the next token
depends on tokens far back. ``tests/unit/test_models.py`` measures that.

Checkpoints are float32, a function of ``(name, seed)`` alone, and cached in a directory whose name carries a digest
of everything that determines them, so a changed builder never meets a stale checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pcp_passes.demo.cache import write_once

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

VOCAB_SIZE = 256
MAX_POSITIONS = 4096
SLIDING_WINDOW = 24
DEFAULT_CACHE = Path(__file__).resolve().parents[1] / "build" / "test-models"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    # Without an end token no sequence stops early, so every case generates the length that it asks for.
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
# CPU_ATTN takes head sizes 32, 64, 80, ... only.
_GQA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
# CPU_MLA is built for a cache row of 512 + 64 values only.
_MLA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "rope_interleave": True,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    # Read by vLLM alone; transformers always routes this way.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True)
class TinyModel:
    """One architecture: transformers' ``model_type`` and the configuration's fields.

    ``habit`` is how strongly the head prefers one successor of each token, which makes text that a draft module can
    predict about as often as a trained one does. ``mtp`` adds that module; see :func:`mtp_tensors`.
    """

    model_type: str
    fields: dict[str, Any]
    gain: float = 1.6
    query_key_gain: float = 2.4
    habit: float = 0.0
    mtp: float | None = None


MODELS: dict[str, TinyModel] = {
    # Dense grouped-query attention: one K and one V cache write per layer.
    "tiny_gqa": TinyModel("qwen3", {**_GQA, "num_hidden_layers": 3}),
    # Sliding and full attention in turn: two KV cache groups, hence two slot mappings and block tables.
    "tiny_sliding": TinyModel(
        "gemma3_text",
        {
            **_GQA,
            "num_hidden_layers": 4,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
    ),
    # Attention sinks, biases and mixture of experts on top of the two kinds of layers.
    "tiny_sinks": TinyModel(
        "gpt_oss",
        {
            **_GQA,
            "num_hidden_layers": 2,
            "sliding_window": SLIDING_WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    # Multi-head latent attention: the cache row is the latent and the rotary key. No expert layer.
    "tiny_mla": TinyModel("deepseek_v3", {**_MLA, "num_hidden_layers": 2, "first_k_dense_replace": 2}),
    # Latent attention and a draft module.
    "tiny_mla_mtp": TinyModel(
        "deepseek_v3",
        {**_MLA, "num_hidden_layers": 2, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1},
        gain=1.25,
        habit=24.0,
        mtp=0.5,
    ),
    # Grouped queries, mixture of experts, and a draft module: chunked prefill and prefix caching with drafts.
    "tiny_glm_mtp": TinyModel(
        "glm4_moe",
        {
            **_GQA,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "use_qk_norm": True,
            "num_nextn_predict_layers": 1,
        },
        gain=1.15,
        habit=24.0,
        mtp=0.3,
    ),
    "tiny_mla_moe": TinyModel("deepseek_v3", {**_MLA, "num_hidden_layers": 3, "first_k_dense_replace": 1}),
}


def build(name: str, *, seed: int = 0, cache_dir: Path | None = None) -> Path:
    """Directory of the checkpoint ``name``: config.json, model.safetensors, tokenizer; written once.

    Args:
        name: a key of :data:`MODELS`.
        seed: of the weights.
        cache_dir: default ``$PCP_TEST_MODELS``, else ``build/test-models``.
    """
    if name not in MODELS:
        raise KeyError(f"{name!r} is not a tiny model; choose one of {', '.join(MODELS)}")
    root = cache_dir or Path(os.environ.get("PCP_TEST_MODELS", DEFAULT_CACHE))

    def write(scratch: Path) -> None:
        make_model(name, seed=seed).save_pretrained(scratch)
        make_tokenizer().save_pretrained(scratch)
        if MODELS[name].mtp is not None:
            add_mtp(scratch, MODELS[name], seed)

    return write_once(root / f"{name}-seed{seed}-{content_key(name, seed)}", write)


def add_mtp(folder: Path, tiny: TinyModel, seed: int) -> None:
    """Append the draft module to a saved checkpoint, under the names that the published ones use: layer ``n``, after
    the ``n`` layers of the target."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | mtp_tensors(tensors, tiny, seed), path, metadata={"format": "pt"})


def mtp_tensors(target: dict[str, torch.Tensor], tiny: TinyModel, seed: int) -> dict[str, torch.Tensor]:
    """A draft module made from the target's own weights.

    Its decoder layer is the target's last one, its head and norms the target's; ``eh_proj`` passes the embedding of the
    next token and ``tiny.mtp`` of a random rotation of the hidden state. So it knows each token's favoured successor
    and not what the context makes of it: it is right about every second time, and a wrong id, hidden state or cache
    row shows in what it proposes.
    """
    layers = tiny.fields["num_hidden_layers"]
    last, ours = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    module = {ours + name.removeprefix(last): t.clone() for name, t in target.items() if name.startswith(last)}
    hidden = tiny.fields["hidden_size"]
    ones = torch.ones(hidden)
    generator = torch.Generator().manual_seed(seed + 1)
    rotation = torch.linalg.qr(torch.randn(hidden, hidden, generator=generator)).Q
    assert tiny.mtp is not None
    module |= {
        ours + "enorm.weight": ones,
        ours + "hnorm.weight": ones.clone(),
        ours + "eh_proj.weight": torch.cat([torch.eye(hidden), tiny.mtp * rotation], dim=1),
        ours + "shared_head.norm.weight": target["model.norm.weight"].clone(),
        ours + "shared_head.head.weight": target["lm_head.weight"].clone(),
        ours + "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
    }
    return module


def content_key(name: str, seed: int) -> str:
    """Digest of the recipe, this file's source and the version that writes the files."""
    import transformers

    recipe = json.dumps([MODELS[name].model_type, MODELS[name].fields, seed, transformers.__version__], sort_keys=True)
    return hashlib.sha256(recipe.encode() + Path(__file__).read_bytes()).hexdigest()[:12]


def make_config(name: str) -> PreTrainedConfig:
    """The transformers configuration of a tiny model."""
    from transformers import AutoConfig

    tiny = MODELS[name]
    return AutoConfig.for_model(tiny.model_type, **_COMMON, **tiny.fields)


def make_model(name: str, *, seed: int = 0) -> PreTrainedModel:
    """The float32 model in evaluation mode, its weights a function of ``(name, seed)``."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_config(make_config(name), dtype=torch.float32)
    initialise(model, MODELS[name], seed)
    return model.eval()


@torch.no_grad()
def initialise(model: PreTrainedModel, tiny: TinyModel, seed: int) -> None:
    """Draw every saved tensor, each from its own generator, so that adding one does not move the others."""
    # Not parameters(): DeepSeek's router has its correction bias in a buffer.
    for name, parameter in model.state_dict().items():
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
        if tiny.mtp is not None and name.endswith("embed_tokens.weight"):
            # Of length sqrt(hidden) each, so that the draft module's own norm of them changes nothing.
            noise /= noise.square().mean(dim=1, keepdim=True).sqrt()
        parameter.copy_(_scale(name, parameter, tiny)(noise))
    if tiny.habit:
        successor = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        head[successor] += tiny.habit * embedding / embedding.shape[1]


def _scale(name: str, parameter: torch.Tensor, tiny: TinyModel) -> Callable[[torch.Tensor], torch.Tensor]:
    gemma = tiny.model_type.startswith("gemma")
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind == "embed_tokens":
        # Gemma multiplies embeddings by sqrt(hidden); unit variance leaves the context its weight beside them.
        hidden = parameter.shape[-1]
        return lambda noise: noise / hidden**0.5 if gemma else noise
    if "norm" in kind:
        # Gemma multiplies by 1 + weight.
        centre = 0.0 if gemma else 1.0
        widen = tiny.query_key_gain - 1.0 if kind in ("q_norm", "k_norm") else 0.0
        return lambda noise: centre + widen + 0.2 * noise
    if kind == "sinks":
        return lambda noise: 2.0 + noise
    if kind.endswith("bias") or parameter.ndim == 1:
        return lambda noise: 0.2 * noise
    # gpt-oss stores its experts as [expert, in, out]; nn.Linear and DeepSeek's experts store [..., out, in].
    fan_in = parameter.shape[-2] if tiny.model_type == "gpt_oss" and parameter.ndim == 3 else parameter.shape[-1]
    gain = tiny.query_key_gain if kind in ("q_proj", "k_proj", "q_b_proj") else tiny.gain
    return lambda noise: noise * (gain / fan_in**0.5)


@functools.cache
def make_tokenizer() -> Any:
    """A tokenizer whose text form of token ``i`` is the word ``w<i>``, so that HTTP prompts can be text too."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", model_max_length=MAX_POSITIONS)


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """``length`` token ids, uniform over the vocabulary, a function of ``(length, seed)``."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + length)
    ids: list[int] = torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()
    return ids
