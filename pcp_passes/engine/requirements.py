# SPDX-License-Identifier: Apache-2.0
"""What an engine needs of kernels, checked when it is built: a shape that no kernel serves is refused before it runs.

On a CPU the references serve every shape, so there only the sparse attention that was asked for by name is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from pcp_passes.engine.options import CACHE_DTYPES, EngineOptions
from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta, rules
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
            latent, rope = _attention(node, options, store, device)
            if device.type == "cuda" and store == "fp8":
                wrong.update(dict.fromkeys(_faults("LatentPackSpec", latent=latent, rope_dim=rope)))
        elif name == "pcp::index_topk" and device.type == "cuda":
            wrong.update(dict.fromkeys(_index_faults(node, options, store)))
    if wrong:
        raise ConfigError(
            f"the sparse indexer of this model has no kernel for {device} with cache_dtype={options.cache_dtype!r} and "
            f"block_size={options.block_size}:\n" + "\n".join(wrong) + "\nChange the option, or run on CPU, where the "
            "references serve every shape."
        )  # fmt: skip


def _attention(node: fx.Node, options: EngineOptions, store: str, device: torch.device) -> tuple[int, int]:
    """Sizes of the latent and of the rope key, when somebody attends over them."""
    q, latent = _shape(node.args[0]), int(rules.named_argument(node, "latent"))
    held = meta.tensor(node)
    assert held is not None, f"%{node.name} has no value"
    rows = torch.uint8 if store == "fp8" else next(kind for kind, name in _STORES.items() if name == store)
    request = backends.Request(device.type, held.dtype, rows, int(q[1]), latent, int(q[2]) - latent)
    backends.choose(request, options.sparse_attention)
    return request.latent, request.rope


def _index_faults(node: fx.Node, options: EngineOptions, store: str) -> Iterator[str]:
    """Of all kernels that one indexer needs."""
    q, topk = _shape(node.args[0]), rules.named_argument(node, "topk")
    heads, dim, page = int(q[1]), int(q[2]), options.block_size
    yield from _faults("TopKSpec", heads=heads, dim=dim, store=store, page=page, topk=topk)
    yield from _faults("ScatterSpec", dim=dim, store=store, page=page)
    yield from _faults("RemapSpec", topk=topk, page=page)


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
