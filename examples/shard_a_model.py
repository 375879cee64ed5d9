# SPDX-License-Identifier: Apache-2.0
"""Context-parallel for a model of one's own: one decorator on its forward, checked on four simulated ranks.

    python examples/shard_a_model.py

On real ranks the decorated model is all there is: start it with torchrun (see hf_two_ranks.py).
"""

import torch
import torch.nn.functional as F
from torch import nn

import pcp_passes


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 256, hidden: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocabulary, hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x + o.transpose(1, 2).flatten(2))


def main() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    ids = torch.randint(0, 256, (1, 37))
    sharded = pcp_passes.simulate_model(model, {"input_ids": ids}, pcp=4)
    with torch.no_grad():
        alone = model(ids)
    print(f"largest difference over 37 tokens on 4 ranks: {(sharded - alone).abs().max():.1e}")
    print(pcp_passes.inspect_model(model, {"input_ids": ids}, pcp=4))


if __name__ == "__main__":
    main()
