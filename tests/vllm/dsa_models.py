# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with DeepSeek sparse attention and a draft module: GLM's form (interleaved rotary pairs in the
indexer, one layer that shares a selection) and DeepSeek V3.2's (half-split pairs, every layer selects)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from tests import models
from tests.models import TinyModel

#: Well below every prompt of interest, so that the selection is none that everybody would make.
TOPK = 8
_DSA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 32,
    "index_topk": TOPK,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 1,
    # Read by vLLM alone.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
MODELS = {
    "glm_moe_dsa": TinyModel(
        "glm_moe_dsa",
        {
            **_DSA,
            "num_hidden_layers": 4,
            "first_k_dense_replace": 1,
            # Full, full, shared, full.
            "index_topk_freq": 2,
            "index_skip_topk_offset": 2,
            # transformers' GLM knows no other way and has no such key; without it vLLM pairs halves.
            "indexer_rope_interleave": True,
            # Draft steps that would read an earlier step's selection: has to be turned off.
            "index_share_for_mtp_iteration": True,
        },
        gain=1.0,
        habit=24.0,
        mtp=0.3,
    ),
    "deepseek_v32": TinyModel(
        "deepseek_v32",
        {**_DSA, "num_hidden_layers": 2, "first_k_dense_replace": 1},
        gain=1.15,
        habit=24.0,
        mtp=0.3,
    ),
}


def make(name: str) -> Any:
    """The float32 transformers model of ``name`` in evaluation mode, without its draft module."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tiny = MODELS[name]
    config = AutoConfig.for_model(tiny.model_type, **models._COMMON, **tiny.fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    models.initialise(model, tiny, seed=0)
    return model.eval()


@functools.cache
def build(name: str) -> Path:
    """Directory of the checkpoint, written once per test run."""
    folder = Path(tempfile.mkdtemp(prefix="pcp-dsa-")) / name
    make(name).save_pretrained(folder)
    models.make_tokenizer().save_pretrained(folder)
    models.add_mtp(folder, MODELS[name], 0)
    return folder
