# SPDX-License-Identifier: Apache-2.0
"""A decoder of your own on four ranks in one process: rules for its cache ops, capture, rewrite, simulate, compare."""

from unittest.mock import patch

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from pcp_passes.ir import printer, rules
from pcp_passes.layout import Batch, build_layout
from pcp_passes.passes import PassContext, build_variants, observers
from pcp_passes.simulate import simulate

PCP, DIM, LAYERS = 4, 64, 2
BATCH = Batch([1, 37, 20, 3], [30, 0, 11, 0], [30, 37, 31, 3])  # new tokens, context, prompt: a decode, three prefills
REQUEST = torch.arange(4).repeat_interleave(torch.tensor(BATCH.num_scheduled))
POSITION = torch.cat([torch.arange(c, c + n) for n, c in zip(BATCH.num_scheduled, BATCH.num_computed, strict=True)])
NOW: dict = {}  # layout, rank and cache of the rank that runs: a serving engine keeps these in its forward context


@torch.library.custom_op("example::write", mutates_args=())
def write(k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
    layout, cache = NOW["layout"], NOW["cache"]  # k and v: the rows of all ranks, rank after rank
    token = layout.gather_index[layout.write_mask]  # each token once, no padding
    cache[layer, REQUEST[token], POSITION[token]] = torch.stack([k, v], 1)[layout.write_mask]
    return k.new_empty(0)


@torch.library.custom_op("example::attend", mutates_args=("out",))
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, layer: int, dep: torch.Tensor) -> None:
    rows = NOW["layout"].rows(NOW["rank"])  # this rank's segments; each sees the prefix up to its own end
    for i, (request, seen) in enumerate(zip(rows.row_request, rows.seq_lens_host, strict=True)):
        mine = slice(*rows.query_start_loc[i : i + 2].tolist())
        causal = torch.arange(seen) <= torch.arange(rows.row_start[i], seen)[:, None]
        keys, values = NOW["cache"][layer, request, :seen].unbind(1)
        out[mine] = scaled_dot_product_attention(q[None, mine], keys[None], values[None], attn_mask=causal)[0]


write.register_fake(lambda k, v, layer: k.new_empty(0))
rules.register_rule("example::write", rules.CacheWrite(rows=(0, 1)))
rules.register_rule("example::attend", rules.LocalQuery(query=0, output=3, new_rows=(1, 2), cache_dep="dep"))


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Parameter(torch.randn(50, DIM))
        self.weights = torch.nn.ParameterList(torch.randn(DIM, 4 * DIM) / 5 for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed[ids] + torch.sin(positions[:, None] / torch.logspace(0, 2, DIM))
        for layer, weight in enumerate(self.weights):
            q, k, v = (rms_norm(x, [DIM]) @ weight[:, DIM:]).chunk(3, -1)
            attend(q, k, v, out := torch.empty_like(x), layer, write(k, v, layer))
            x = x + out @ weight[:, :DIM]
        return x


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    model, ids = Decoder(), torch.randint(50, (BATCH.num_tokens,))
    cached = torch.randn(LAYERS, BATCH.num_requests, 64, 2, DIM)  # of the context; real engines page it
    with patch.dict(NOW, layout=build_layout(BATCH, 1), rank=0, cache=cached.clone()):
        expected = model(ids, POSITION)
    exported = torch.export.export(model, (ids, POSITION), dynamic_shapes=[{0: torch.export.Dim("rows")}] * 2)
    body = build_variants(exported.graph_module, PassContext(PCP), [observers.VerifyObserver("every")])["sharded"]
    print("\n".join(line for line in printer.print_graph(body).splitlines() if "pcp." in line or "example." in line))
    layout = build_layout(BATCH, PCP)
    inputs = [[*model.parameters(), ids[i], POSITION[i]] for i in layout.gather_index.reshape(PCP, -1)]
    now = [{"layout": layout, "rank": rank, "cache": cached.clone()} for rank in range(PCP)]
    hidden = simulate(body, inputs, rank_context=lambda rank: patch.dict(NOW, now[rank]))
    difference = float((torch.cat([out for (out,) in hidden])[layout.restore_index] - expected).abs().max())
    print(f"{layout.padded_tokens} rows per rank; largest difference from one rank {difference:.1e}")
    assert difference < 1e-4, "four ranks give something else than one"


if __name__ == "__main__":
    main()
