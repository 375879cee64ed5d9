# SPDX-License-Identifier: Apache-2.0
"""What an engine needs of kernels, checked when it is built: a shape that no kernel serves is refused before it runs.

On a CPU the references serve every shape, so there only the sparse attention that was asked for by name is checked.
Full graphs have a check of their own, for what only a graph cannot serve.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pcp_passes.engine.graphs import make_buckets
from pcp_passes.engine.options import CACHE_DTYPES, EngineOptions
from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta, rules
from pcp_passes.paged import experts
from pcp_passes.paged.records import Store
from pcp_passes.sparse import backends

RECORDS: dict[str, Store] = {"auto": "native", "bf16": "bf16", "fp8": "fp8"}
"""Store of records by ``cache_dtype``."""

_STORES = {
    torch.float8_e4m3fn: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
    torch.float64: "fp64",
}  # fmt: skip


def require_kernels(graphs: list[fx.Graph], options: EngineOptions, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse what no kernel computes.

    Args:
        graphs: of the bodies.
        options: of the engine.
        dtype: of the model.
        device: that the engine runs on.

    Raises:
        ConfigError: sizes, a page or a dtype without a kernel on CUDA, with the supported ones; or a sparse-attention
            back end that cannot serve the model here.
    """
    store = _STORES.get(CACHE_DTYPES[options.cache_dtype] or dtype, str(dtype))
    wrong: dict[str, None] = {}
    for node in (node for graph in graphs for node in graph.nodes):
        name = rules.op_name(node)
        if name == "pcp::mla_attend" and rules.named_argument(node, "indices") is not None:
            _attention(node, options, store, device)
        elif device.type != "cuda":
            continue
        elif name == "pcp::index_topk":
            wrong.update(dict.fromkeys(_index_faults(node, options, store)))
        elif name == "pcp::pack_record" and rules.argument(node, 3) == "fp8":
            wrong.update(dict.fromkeys(_latent_faults(node)))
        elif name == "pcp_kernels::dsa_pack":
            wrong.update(dict.fromkeys((*_latent_faults(node), *_prologue_faults(node, "PackSpec", "k"))))
        elif name == "pcp_kernels::index_prep":
            heads = int(_shape(node.args[0])[1])
            wrong.update(dict.fromkeys(_prologue_faults(node, "PrepSpec", "q", heads=heads)))
    if wrong:
        raise ConfigError(
            f"the sparse indexer, or the FP8 latents, of this model have no kernel for {device} with "
            f"cache_dtype={options.cache_dtype!r} and block_size={options.block_size}:\n" + "\n".join(wrong) + "\n"
            "Change the option, or run on CPU, where the references serve every shape."
        )  # fmt: skip


def require_full_graphs(graphs: list[fx.Graph], options: EngineOptions, steps: int, device: torch.device) -> None:
    """Refuse full graphs that would hold many copies of experts' weights, of the largest bucket by requests.

    Args:
        graphs: of the bodies.
        options: of the engine.
        steps: drafts per step.
        device: that the engine runs on; of a CUDA device that is not there only what no card has is refused.

    Raises:
        ConfigError: more than :data:`pcp_passes.paged.experts.MAX_TURNS` copies in one op.
    """
    if device.type != "cuda" or not options.graph_mode.startswith("full"):
        return
    card, rows = backends.capability(), 0
    for node in (node for graph in graphs for node in graph.nodes if rules.op_name(node) == "pcp::experts"):
        hidden, gate_up, down = (meta.tensor(rules.argument(node, place)) for place in (0, 3, 4))
        assert hidden is not None and gate_up is not None and down is not None, f"%{node.name} has no operands"
        if experts.grouped_serves(hidden, gate_up, down) and (card is None or experts.grouped_runs_on(card)):
            continue
        rows = rows or make_buckets(options, steps).max_requests * (1 + steps)
        width = int(_shape(rules.argument(node, 1))[1])
        turns, fit = experts.turns(rows * width, gate_up, down), experts.most_pairs(gate_up, down) // width
        if turns > experts.MAX_TURNS:
            fewer = fit // (1 + steps)
            raise ConfigError(
                f"graph_mode={options.graph_mode!r} would copy the weights of experts in {turns:,} turns within one "
                f"graph ({rows:,} rows x {width} experts of {list(gate_up.shape[1:])} and {list(down.shape[1:])} in "
                f"{str(gate_up.dtype).removeprefix('torch.')}, for which {device} has no grouped product); required "
                f"at most {experts.MAX_TURNS}. Set graph_mode='piecewise', which runs experts between graphs"
                f"{f', or graph_requests of at most {fewer:,}' if fewer else ''}."
            )


def _attention(node: fx.Node, options: EngineOptions, store: str, device: torch.device) -> None:
    """Whether somebody attends over such rows."""
    q, latent = _shape(node.args[0]), int(rules.named_argument(node, "latent"))
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} has no value"
    rows = torch.uint8 if store == "fp8" else next(kind for kind, name in _STORES.items() if name == store)
    request = backends.Request(device.type, held.dtype, rows, int(q[1]), latent, int(q[2]) - latent)
    backends.choose(request, options.sparse_attention)


def _index_faults(node: fx.Node, options: EngineOptions, store: str) -> Iterator[str]:
    """Of all kernels that one indexer needs."""
    q, topk = _shape(node.args[0]), rules.named_argument(node, "topk")
    heads, dim, page = int(q[1]), int(q[2]), options.block_size
    yield from _faults("TopKSpec", heads=heads, dim=dim, store=store, page=page, topk=topk)
    yield from _faults("ScatterSpec", dim=dim, store=store, page=page)
    yield from _faults("RemapSpec", topk=topk, page=page)
    card = backends.capability()
    if store == "fp8" and card is not None and card < (8, 9):
        yield f"  device: found compute capability {card[0]}.{card[1]}; supported: 8.9 and above for fp8"


def _latent_faults(node: fx.Node) -> Iterator[str]:
    """Of the kernel that packs latents and rope keys, the first two operands, to FP8."""
    latent, rope = (int(_shape(node.args[place])[-1]) for place in (0, 1))
    yield from _faults("LatentPackSpec", latent=latent, rope_dim=rope)


def _prologue_faults(node: fx.Node, spec: str, turned: str, **sizes: int) -> Iterator[str]:
    """Of the kernel that turns and quantises keys or queries, its operand ``turned``."""
    cos = rules.named_argument(node, "cos")
    yield from _faults(
        spec, dim=int(_shape(rules.named_argument(node, turned))[-1]), rope=rules.named_argument(node, "rope"),
        rope_dim=0 if cos is None else 2 * int(_shape(cos)[-1]), **sizes,
    )  # fmt: skip


def _faults(spec: str, **values: Any) -> Iterator[str]:
    """What is wrong with these values, in the words of the spec."""
    from pcp_kernels import specs

    try:
        getattr(specs, spec)(**values)
    except ValueError as error:
        yield from str(error).splitlines()[1:]


def _shape(node: Any) -> tuple[Any, ...]:
    held = meta.tensor(node)
    assert held is not None, f"%{node} has no value"
    return tuple(held.shape)
