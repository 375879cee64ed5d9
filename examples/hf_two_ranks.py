# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face model on two gloo ranks, unmodified.

    python examples/hf_two_ranks.py                          # starts two processes itself
    torchrun --nproc-per-node 2 examples/hf_two_ranks.py     # the same under torchrun

Every rank passes the whole prompt and gets the logits of its last token.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import pcp_passes


def build() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def rank_main() -> None:
    """What each rank runs once the process group is there."""
    model = build()
    sharded = pcp_passes.context_parallel(model, tokens={"input_ids": 1}, outputs="last", inner="eager")
    for length in (100, 64, 7):
        ids = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(length))
        last = sharded(input_ids=ids, use_cache=False).logits
        with torch.no_grad():
            alone = model(input_ids=ids, use_cache=False).logits[:, -1:]
        if dist.get_rank() == 0:
            print(f"{length:>4} tokens: last token's logits differ by {(last - alone).abs().max():.1e}", flush=True)
    assert sharded.sharded.compilations == 1
    dist.barrier()
    dist.destroy_process_group()


def spawned(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    rank_main()


def main() -> None:
    if "RANK" in os.environ:  # started by torchrun
        dist.init_process_group("gloo")
        rank_main()
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(spawned, (folder,), nprocs=2)


if __name__ == "__main__":
    main()
