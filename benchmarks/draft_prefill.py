# SPDX-License-Identifier: Apache-2.0
"""What the first draft pass of a prefill costs a rank: rows, operations and CPU time, beside those of one rank.

The pass runs the MTP module over all tokens of the prompt. Sharded, a rank runs its M rows, gathers the new cache rows
and writes all of them; replicated, as other systems do it, every rank runs all T rows, behind a gather of all hidden
states. Ranks are run one after another in this process, one thread, and the slowest counts; a gather costs its copy.

    python benchmarks/draft_prefill.py [--tokens 4096] [--pcp 2 4] [--models dense dsa] [--repeats 5] [--json] [--check]

``dense``: hidden 512, 8 query and 4 key heads of 64, feed-forward 1536, f32. ``dsa``: the MTP layer of a GLM-MoE-DSA of
transformers at hidden 512, random weights. Attention is counted over the keys that are visible (dense only); in the
linear layers every row counts, padded ones too: these are the recompute, and are printed.

``--check`` exits with 1 when the sharded pass of two ranks takes more than 0.58 of one rank's CPU time, or a rank more
operations than its part, the recompute and the imbalance of attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from pcp_passes.collectives import bind_axis, unbind_axis
from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.layout import Batch, build_layout
from pcp_passes.paged import AttentionInputs, PagedCaches, kv_attend, kv_write, running
from pcp_passes.passes import PassContext
from pcp_passes.step import ops, plan_inputs

MAX_RATIO = 0.58
HIDDEN, HEADS, KEY_HEADS, DIM, VOCABULARY, BLOCK = 512, 8, 4, 64, 1024, 64


class DenseMTP(nn.Module):
    """A next-token module with one dense decoder layer: ids i64[N], positions i64[N], hidden [N, H] -> [N, H]."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.qkv = nn.Linear(hidden, (HEADS + 2 * KEY_HEADS) * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, hidden, bias=False)
        self.up, self.gate = (nn.Linear(hidden, 3 * hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        x = self.join(torch.cat([self.embed(ids), hidden], -1))
        q, k, v = (
            self.qkv(nn.functional.rms_norm(x, x.shape[-1:]))
            .unflatten(-1, (-1, DIM))
            .split([HEADS, KEY_HEADS, KEY_HEADS], 1)
        )
        angle = positions.to(x.dtype)[:, None, None] * 10000.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
        q, k = (torch.cat([y[..., ::2] * angle.cos(), y[..., 1::2] * angle.sin()], -1) for y in (q, k))
        x = x + self.out(kv_attend(q, kv_write(k, v, "drafter.0"), "drafter.0").flatten(1))
        y = nn.functional.rms_norm(x, x.shape[-1:])
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


@dataclass(frozen=True)
class Line:
    """One way to run the pass, the slowest rank of it."""

    model: str
    way: str
    pcp: int
    tokens: int
    rows: int
    padding_rows: int
    linear_flops: int
    attention_flops: int
    """Of the rank with the most, over visible keys."""
    seconds: float
    ratio: float
    restored_bytes: int
    """Hidden states that a rank sends before the pass."""

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops


def capture_model(kind: str, hidden: int) -> Model:
    """The module as bodies of one rank, to be taken ``over`` others."""
    torch.manual_seed(0)
    ids, states = torch.arange(96), torch.zeros(96, hidden)
    if kind == "dense":
        captured = {"": prepare(DenseMTP(hidden).eval().requires_grad_(False), (ids, ids, states))}
    else:
        captured = {"": capture_dsa(ids, states)}
    head = nn.Linear(hidden, VOCABULARY, bias=False)
    bodies = make_bodies(captured, PassContext(1))
    return Model("drafter", bodies, head, hidden, VOCABULARY, ("drafter.0",), torch.float32, captured=captured)


def capture_dsa(ids: torch.Tensor, states: torch.Tensor) -> Any:
    """The MTP layer of a GLM-MoE-DSA with random weights."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from pcp_passes.frontends.transformers.mtp import MTPLayer
    from pcp_passes.frontends.transformers.paged import paged_capture

    config = CONFIG_MAPPING["glm_moe_dsa"](
        vocab_size=VOCABULARY, hidden_size=states.shape[1], intermediate_size=3 * states.shape[1],
        moe_intermediate_size=384, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8,
        n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1, q_lora_rank=128,
        kv_lora_rank=128, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=64, index_topk=64, index_n_heads=8,
        index_head_dim=64, num_nextn_predict_layers=1, max_position_embeddings=65536,
    )  # fmt: skip
    layer = MTPLayer(AutoModelForCausalLM.from_config(config).eval()).eval().requires_grad_(False)
    with paged_capture(layer):
        return prepare(layer, (ids, ids, states))


class Pass:
    """The first draft pass over one prompt, on any rank of any way to run it."""

    def __init__(self, model: Model, tokens: int, width: int) -> None:
        self.model, self.tokens, self.width = model, tokens, width
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
        self.hidden = torch.randn(tokens, model.hidden_size, generator=generator)
        self.positions = torch.arange(tokens)
        self.tables = torch.arange(-(-tokens // BLOCK), dtype=torch.int32)[None]
        self.caches = PagedCaches(self.tables.numel(), BLOCK)

    def run(self, variant: str, operands: tuple[torch.Tensor, ...], inputs: AttentionInputs) -> float:
        """CPU seconds of one call, without what the step program prepares once for target and drafter."""
        body = self.model.bodies[variant]
        with torch.no_grad(), running(self.caches, inputs):
            began = time.thread_time()
            body(*operands)
            return time.thread_time() - began

    def whole(self) -> tuple[str, tuple[torch.Tensor, ...], AttentionInputs]:
        """All rows."""
        starts, lengths = torch.tensor([0, self.tokens]), torch.tensor([self.tokens])
        inputs = AttentionInputs(self.positions, "replicated", self.tables, starts, lengths, self.positions)
        return "replicated", (self.ids, self.positions, self.hidden), inputs

    def of_rank(self, pcp: int, rank: int) -> tuple[str, tuple[torch.Tensor, ...], AttentionInputs]:
        """The rows of one rank of the zigzag layout."""
        layout = build_layout(Batch([self.tokens], [0], [self.tokens]), pcp)  # type: ignore[arg-type]
        plan = plan_inputs(layout, rank, [self.tokens - 1])
        where = self.positions[plan.local_rows]
        slots = ops.expand_slots(self.positions, plan.gather_index, plan.write_mask)
        starts = plan.row_query_start_loc
        tables, lengths = self.tables[plan.row_request], ops.row_lengths(where, starts)
        inputs = AttentionInputs(slots, "rank_major", tables, starts, lengths, where)
        return "sharded", (self.ids[plan.local_rows], where, self.hidden[plan.local_rows]), inputs

    def linear_flops(self, call: tuple[str, tuple[torch.Tensor, ...], AttentionInputs]) -> int:
        """Of the linear layers, as PyTorch counts them: every row, padded ones too."""
        with FlopCounterMode(display=False) as counter:
            self.run(*call)
        return int(counter.get_total_flops())

    def attention_flops(self, call: tuple[str, tuple[torch.Tensor, ...], AttentionInputs]) -> int:
        """Products with visible keys and values, ``width`` multiplications each over all heads."""
        inputs = call[2]
        keys = sum(int((inputs.positions[start:end] + 1).sum()) for _, start, end, _ in inputs.segments)
        return 2 * self.width * keys


def measure(kind: str, tokens: int, pcps: list[int], repeats: int, hidden: int = HIDDEN) -> list[Line]:
    """One rank, then for each P the sharded and the replicated pass; times are medians, taken in turns."""
    captured = capture_model(kind, hidden)
    width = HEADS * 2 * DIM if kind == "dense" else 0  # what dsa selects is no dense product, and is not counted
    passes = {pcp: Pass(captured.over(PassContext(pcp)), tokens, width) for pcp in (1, *pcps)}
    one = passes[1]
    calls = {("one rank", 1, 0): one.whole()}
    calls |= {("sharded", pcp, rank): passes[pcp].of_rank(pcp, rank) for pcp in pcps for rank in range(pcp)}
    calls |= {("replicated", pcp, 0): passes[pcp].whole() for pcp in pcps}
    times: dict[tuple[str, int, int], list[float]] = {key: [] for key in calls}
    for _ in range(repeats + 1):
        for key, call in calls.items():
            bind_axis("pcp", lambda rows, pcp=key[1]: torch.cat([rows] * pcp))
            times[key].append(passes[key[1]].run(*call))
    middle = {key: statistics.median(seconds[1:]) for key, seconds in times.items()}  # the first allocates
    lines = []
    for way, pcp in dict.fromkeys((way, pcp) for way, pcp, _ in calls):
        ranks = [key for key in calls if key[:2] == (way, pcp)]
        bind_axis("pcp", lambda rows, pcp=pcp: torch.cat([rows] * pcp))
        rows = len(calls[ranks[0]][1][0])
        seconds = max(middle[key] for key in ranks)
        restored = -(-rows // pcp) * hidden * 4 if way == "replicated" else 0
        lines.append(Line(
            kind, way, pcp, tokens, rows, pcp * rows - tokens if way == "sharded" else 0,
            max(passes[pcp].linear_flops(calls[key]) for key in ranks),
            max(passes[pcp].attention_flops(calls[key]) for key in ranks),
            seconds, seconds / middle["one rank", 1, 0], restored,
        ))  # fmt: skip
    unbind_axis("pcp")
    return lines


def failures(lines: list[Line]) -> list[str]:
    """What is above its bound."""
    found = []
    for line in lines:
        one = next(other for other in lines if (other.model, other.way) == (line.model, "one rank"))
        if line.way != "sharded":
            continue
        recompute = line.padding_rows * one.linear_flops / line.tokens / line.pcp
        if line.linear_flops > 1.001 * one.linear_flops / line.pcp + recompute:
            found.append(f"{line.model} P={line.pcp}: {line.linear_flops} operations in linear layers")
        if line.attention_flops > 1.02 * one.attention_flops / line.pcp:
            found.append(f"{line.model} P={line.pcp}: {line.attention_flops} operations in attention")
        if line.pcp == 2 and line.ratio > MAX_RATIO:
            found.append(f"{line.model} P=2: {line.ratio:.2f} of one rank's CPU time, at most {MAX_RATIO}")
    return found


def table(lines: list[Line]) -> str:
    """For people."""
    head = "model  P  first draft pass  rows/rank  recomputed  GFLOP/rank   share    CPU s   ratio  sent before it"
    text = [f"{lines[0].tokens} tokens", head]
    for line in lines:
        one = next(other for other in lines if (other.model, other.way) == (line.model, "one rank"))
        text.append(
            f"{line.model:<5} {line.pcp:>2}  {line.way:<16} {line.rows:>10} {line.padding_rows:>11} "
            f"{line.flops / 1e9:>11.2f} {line.flops / one.flops:>7.3f} {line.seconds:>8.3f} {line.ratio:>7.2f} "
            f"{line.restored_bytes:>12} B"
        )
    return "\n".join(text)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pcp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", choices=["dense", "dsa"], default=["dense", "dsa"])
    parser.add_argument("--hidden", type=int, default=HIDDEN)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    lines = [
        line for kind in given.models for line in measure(kind, given.tokens, given.pcp, given.repeats, given.hidden)
    ]
    wrong = failures(lines)
    if given.json:
        print(json.dumps({"lines": [asdict(line) for line in lines], "failures": wrong}, indent=2))
    else:
        print("\n".join([table(lines), *wrong]))
    return int(bool(given.check and wrong))


if __name__ == "__main__":
    sys.exit(main())
