# SPDX-License-Identifier: Apache-2.0
"""DeepSeek sparse attention of a transformers model, lowered: the same keys are selected, on one rank and on four.

python examples/sparse_index.py
"""

import itertools
from unittest.mock import patch

import torch

import pcp_passes
from pcp_kernels.reference import select

TOKENS, TOPK = 120, 12


def build() -> torch.nn.Module:
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32,
        num_hidden_layers=2, mlp_layer_types=["dense"] * 2, indexer_types=["full", "shared"],
        # With few heads many keys of a row score exactly 0, and which of them torch.topk takes is its own affair.
        index_n_heads=16, index_head_dim=32, index_topk=TOPK, initializer_range=0.05,
    )  # fmt: skip
    return GlmMoeDsaForCausalLM._from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def unlowered(model: torch.nn.Module, ids: torch.Tensor) -> tuple[torch.Tensor, list[list[set[int]]]]:
    """Logits, and what each indexer of transformers selects for each token: rows of fewer keys are filled with any."""
    layers: list[list[set[int]]] = []

    def keep(module: torch.nn.Module, given: object, indices: torch.Tensor) -> None:
        layers.append([{key for key in row if key <= token} for token, row in enumerate(indices[0].tolist())])

    indexers = [layer.self_attn.indexer for layer in model.model.layers if layer.self_attn.indexer is not None]
    handles = [indexer.register_forward_hook(keep) for indexer in indexers]
    logits = model(ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits, layers


def lowered(model: torch.nn.Module, ids: torch.Tensor, pcp: int) -> tuple[torch.Tensor, list[list[set[int]]]]:
    """The same on ``pcp`` simulated ranks, each of which selects for its own tokens."""
    calls: list[tuple[list[int], list[list[int]]]] = []
    original = select.topk_rows

    def keep(q, w, k, scale, ks, ke, *rest, **named):
        indices = original(q, w, k, scale, ks, ke, *rest, **named)
        calls.append((ke.tolist(), indices.tolist()))
        return indices

    with patch.object(select, "topk_rows", keep):
        logits = pcp_passes.simulate_model(model, {"input_ids": ids}, pcp=pcp).logits
    layers: list[list[set[int]]] = [[set()] * TOKENS for _ in calls[::pcp]]
    for number, (ends, rows) in enumerate(calls):
        for end, row in zip(ends, rows, strict=True):
            layers[number // pcp][end - 1] = set(row) - {-1}
    return logits, layers


def main() -> None:
    model = build()
    ids = torch.randint(0, 256, (1, TOKENS))
    found = {"unlowered": unlowered(model, ids)} | {f"P={pcp}": lowered(model, ids, pcp) for pcp in (1, 4)}
    print(f"{TOKENS} tokens, the best {TOPK} keys of each, {len(found['P=4'][1])} of 2 layers with an indexer")
    for (one, (a, keys)), (other, (b, others)) in itertools.combinations(found.items(), 2):
        rows = [same for pair in zip(keys, others, strict=True) for same in map(set.__eq__, *pair)]
        print(f"{one} and {other}: {sum(rows)} of {len(rows)} rows equal, logits differ by {(a - b).abs().max():.1e}")
        assert one == "unlowered" or all(rows), "ranks select other keys"


if __name__ == "__main__":
    main()
