# SPDX-License-Identifier: Apache-2.0
"""The folder that a tiny model is kept in: ``config.json`` and one ``model.safetensors``, as published models are.

transformers writes the target, its experts one by one. It knows no MTP layer, so that is added here under the names
that published checkpoints use: ``model.layers.<number of layers>.*``, with a copy of the embedding, which a drafter on
the last of several pipeline stages has from nowhere else, and without a head of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GlmMoeDsaForCausalLM

from tiny.model import TinyGlm

EXACT = ("e_score_correction_bias", "indexer.weights_proj.weight", "mlp.gate.weight")
"""Kept in f32: rounding them moves whole tokens to other experts."""


def save(model: TinyGlm, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write ``model``; ``config.json`` names ``dtype``, in which all but :data:`EXACT` are stored."""
    # The end of a document is text like any other to a demonstration.
    model.main.generation_config.eos_token_id = None
    model.main.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file) | mtp_tensors(model)
    stored = {name: t if name.endswith(EXACT) else t.to(dtype) for name, t in sorted(tensors.items())}
    save_file(stored, file, metadata={"format": "pt"})
    write_json(folder / "config.json", {"dtype": str(dtype).removeprefix("torch.")})


def write_json(file: Path, entries: dict[str, object]) -> None:
    """Add ``entries`` to the object in ``file``."""
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | entries, indent=2, sort_keys=True) + "\n")


def mtp_tensors(model: TinyGlm) -> dict[str, Tensor]:
    """The MTP layer's tensors by their published names."""
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    tensors: dict[str, Tensor] = {f"{prefix}embed_tokens.weight": model.main.model.embed_tokens.weight.detach().clone()}
    for name, tensor in model.mtp.state_dict().items():
        published = prefix + name.removeprefix("block.").replace("head_norm", "shared_head.norm")
        stack, _, which = published.rpartition(".")
        if which == "gate_up_proj":
            for number, expert in enumerate(tensor):
                gate, up = expert.chunk(2)
                tensors[f"{stack}.{number}.gate_proj.weight"] = gate.clone()
                tensors[f"{stack}.{number}.up_proj.weight"] = up.clone()
        elif which == "down_proj":
            for number, expert in enumerate(tensor):
                tensors[f"{stack}.{number}.down_proj.weight"] = expert.clone()
        else:
            tensors[published] = tensor
    return tensors


def load(folder: Path) -> TinyGlm:
    """What :func:`save` wrote, in f32. Raises ``KeyError`` for a missing tensor, ``ValueError`` for a surplus one."""
    main = GlmMoeDsaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = TinyGlm(main.config)
    model.main = main
    prefix = f"model.layers.{main.config.num_hidden_layers}."
    stored = {name: t for name, t in load_file(folder / "model.safetensors").items() if name.startswith(prefix)}
    stored.pop(f"{prefix}embed_tokens.weight")  # a copy of the target's, which the layer shares here
    state = model.mtp.state_dict()
    for name in state:
        published = prefix + name.removeprefix("block.").replace("head_norm", "shared_head.norm")
        stack, _, which = published.rpartition(".")
        numbers = range(main.config.n_routed_experts)
        if which == "gate_up_proj":
            parts = ("gate_proj", "up_proj")
            state[name] = torch.stack(
                [torch.cat([stored.pop(f"{stack}.{number}.{part}.weight") for part in parts]) for number in numbers]
            )
        elif which == "down_proj":
            state[name] = torch.stack([stored.pop(f"{stack}.{number}.down_proj.weight") for number in numbers])
        else:
            state[name] = stored.pop(published)
    if stored:
        raise ValueError(f"tensors of the MTP layer that nothing reads: {sorted(stored)}")
    model.mtp.load_state_dict(state)
    return model
