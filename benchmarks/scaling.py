# SPDX-License-Identifier: Apache-2.0
"""How much less one of two ranks does: CPU time of a prefill on one rank over that of the slower of two.

Two gloo processes, one thread each, pinned to a core each. The baseline is the same model on one rank, compiled by
Inductor as well, in rank 0 between barriers, so both sides are measured in one run; the judged number is CPU time,
which does not count waiting. The dense model (4 layers, hidden 512, 8 query and 4 key heads, f32) calls flash attention
with ``is_causal`` on one rank; MLA and GLM-DSA are models of transformers, whose one-rank form is compiled from the
graph with positions in place of masks.

    python benchmarks/scaling.py [--tokens 4096 8192] [--repeats 5] [--models dense mla dsa] [--attention] [--check]

``--attention`` also times attention alone, beside PyTorch's private ring attention with its CPU flash op.
``--check`` exits with 1 when the dense model's median is below 1.85 at one of the lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

MIN_RATIO = 1.85
VOCABULARY = 1024


class Dense(nn.Module):
    """A decoder with grouped-query attention and rotary positions."""

    def __init__(self, layers: int = 4, hidden: int = 512, heads: int = 8, key_heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, key_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits f32[1, T, V] of ids i64[1, T]."""
        x = self.embed(input_ids)
        angles = torch.arange(input_ids.shape[1])[:, None] * self.layers[0].frequencies  # type: ignore[union-attr]
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class Layer(nn.Module):
    """Attention and a gated MLP."""

    def __init__(self, hidden: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.width = heads, key_heads, hidden // heads
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.kv = nn.Linear(hidden, 2 * key_heads * self.width, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 3 * hidden, bias=False)
        self.gate = nn.Linear(hidden, 3 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(self.width // 2) / (self.width // 2)))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """One layer on f32[1, T, hidden]."""
        batch, tokens, _ = x.shape
        h = self.norm1(x)
        q = self.q(h).view(batch, tokens, self.heads, self.width).transpose(1, 2)
        k, v = self.kv(h).view(batch, tokens, 2, self.key_heads, self.width).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(o.transpose(1, 2).reshape(batch, tokens, -1))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions, halves split."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def of_transformers(kind: str) -> nn.Module:
    """An MLA model, or one with DeepSeek's sparse attention, of the same size."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "kv_lora_rank": 128, "q_lora_rank": 256,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, "first_k_dense_replace": 4,
        "max_position_embeddings": 32768, "use_cache": False, "moe_intermediate_size": 128, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    if kind == "dsa":
        shape |= {
            "index_topk": 256, "index_head_dim": 32, "index_n_heads": 8, "mlp_layer_types": ["dense"] * 4,
            "layer_types": ["indexed_attention"] * 4, "qk_head_dim": 96, "head_dim": 32,
        }  # fmt: skip
    config = CONFIG_MAPPING["glm_moe_dsa" if kind == "dsa" else "deepseek_v3"](**shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return Logits(model)


class Logits(nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Logits f32[1, T, V] of ids i64[1, T]."""
        return self.model(input_ids=input_ids, use_cache=False).logits


def build(kind: str) -> nn.Module:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    model = Dense() if kind == "dense" else of_transformers(kind)
    return model.eval().requires_grad_(False)


def baseline(kind: str, model: nn.Module) -> Any:
    """The model on one rank."""
    if kind == "dense":
        return torch.compile(model, dynamic=True)
    from pcp_passes import context_parallel

    return context_parallel(model, tokens={"input_ids": 1}, group=dist.new_group([0]), axis="one")


def rank_main(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    """One of two ranks."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})  # type: ignore[operator]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    found: list[dict[str, Any]] = []
    for kind in arguments.models:
        found += compare(kind, rank, arguments)
    if arguments.attention:
        found += [attention_alone(tokens, rank, arguments.repeats) for tokens in arguments.tokens]
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def compare(kind: str, rank: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Both sides of one model, interleaved."""
    from pcp_passes import context_parallel

    model = build(kind)
    two = context_parallel(model, tokens={"input_ids": 1})
    one = baseline(kind, model) if kind == "dense" or rank == 0 else dist.new_group([0])
    found = []
    for tokens in arguments.tokens:
        torch.manual_seed(1)
        ids = torch.randint(0, VOCABULARY, (1, tokens))
        error = 0.0
        pairs = []
        for repeat in range(arguments.repeats + 1):
            dist.barrier()
            seconds, out = timed(two, ids)
            slowest = torch.tensor(seconds)
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            if rank == 0:
                single, expected = timed(one, ids)
                error = max(error, float((out - expected).abs().max() / expected.abs().max()))
                pairs.append((single, float(slowest)))
            dist.barrier()
            del repeat
        if rank == 0:
            found.append(row(kind, tokens, pairs[1:], error, two.sharded.compilations))  # the first compiles
    return found


def timed(call: Any, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
    """CPU seconds of this process in one call, and its result."""
    began = time.process_time()
    with torch.no_grad():
        out = call(ids)
    return time.process_time() - began, out


def row(kind: str, tokens: int, pairs: list[tuple[float, float]], error: float, compilations: int) -> dict[str, Any]:
    """One line of the result."""
    ratios = [one / two for one, two in pairs]
    return {
        "model": kind, "tokens": tokens, "one_s": statistics.median(p[0] for p in pairs),
        "two_s": statistics.median(p[1] for p in pairs), "ratio": statistics.median(ratios),
        "low": min(ratios), "high": max(ratios), "error": error, "compilations": compilations,
    }  # fmt: skip


def attention_alone(tokens: int, rank: int, repeats: int) -> dict[str, Any]:
    """Attention of 8 heads of 64: ours (gather keys and values, then attend) and PyTorch's private ring."""
    from pcp_passes.attention import attend
    from pcp_passes.frontends.torch.plan import build_plan

    torch.manual_seed(2)
    q, k, v = (torch.randn(1, 8, tokens, 64) for _ in range(3))
    plan = build_plan(tokens, 2, "zigzag")
    mine = [x.index_select(2, plan.rows[rank]) for x in (q, k, v)]

    def ours() -> torch.Tensor:
        packed = torch.cat([mine[1], mine[2]], -1).permute(2, 0, 1, 3).contiguous()
        gathered = packed.new_empty((2 * packed.shape[0], *packed.shape[1:]))
        dist.all_gather_into_tensor(gathered, packed)
        keys, values = gathered.index_select(0, plan.restore).permute(1, 2, 0, 3).split(64, -1)
        return attend(mine[0], keys, values, plan.rows[rank])

    ring = ring_attention(mine)
    times: dict[str, list[float]] = {"one": [], "ours": [], "ring": []}
    for _ in range(repeats + 1):
        dist.barrier()
        times["one"].append(timed_only(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        dist.barrier()
        times["ours"].append(slower(timed_only(ours)))
        dist.barrier()
        times["ring"].append(slower(timed_only(ring)))
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    return {
        "model": "attention", "tokens": tokens, "one_s": middle["one"], "two_s": middle["ours"],
        "ratio": middle["one"] / middle["ours"], "ring_ratio": middle["one"] / middle["ring"],
    }  # fmt: skip


def ring_attention(mine: list[torch.Tensor]) -> Any:
    """PyTorch's private ring (load balanced by the same zigzag) around the CPU flash op. Inference only."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as private

    mesh = init_device_mesh("cpu", (2,))
    private._cp_options.enable_load_balance = True

    def flash(query: Any, key: Any, value: Any, is_causal: bool = False, **_: Any) -> Any:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)

    return lambda: private._templated_ring_attention(mesh.get_group(), 2, flash, *mine, is_causal=True)


def timed_only(call: Any) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    with torch.no_grad():
        call()
    return time.process_time() - began


def slower(seconds: float) -> float:
    """The larger of both ranks' times."""
    most = torch.tensor(seconds)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return float(most)


def line(found: dict[str, Any]) -> str:
    """One result as text."""
    text = f"{found['model']:<10} {found['tokens']:>6} tokens   CPU s {found['one_s']:.3f} / {found['two_s']:.3f}   "
    text += f"{found['ratio']:.2f}x"
    if "ring_ratio" in found:
        return f"{text}   PyTorch's private ring {found['ring_ratio']:.2f}x"
    return f"{text} [{found['low']:.2f} .. {found['high']:.2f}]   error {found['error']:.1e}"


def main(argv: list[str] | None = None) -> int:
    """Start two ranks and print what rank 0 found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--models", nargs="+", choices=["dense", "mla", "dsa"], default=["dense"])
    parser.add_argument("--attention", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, (arguments, folder), nprocs=2)
        found = json.loads(Path(folder, "found.json").read_text())
    print(json.dumps(found, indent=2) if arguments.json else "\n".join(map(line, found)))
    slow = [f for f in found if f["model"] == "dense" and f["ratio"] < MIN_RATIO]
    return int(bool(arguments.check and slow))


if __name__ == "__main__":
    sys.exit(main())
