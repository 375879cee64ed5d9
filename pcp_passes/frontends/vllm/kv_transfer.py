# SPDX-License-Identifier: Apache-2.0
"""A KV producer under PCP: a prefill is published once, when the drafter's cache rows are there too.

vLLM hands each layer's cache to the connector right after that layer's attention. The target's layers would thus be
published before the drafter has run, and whoever found them would load a prompt whose drafter rows do not exist yet. So
what the layers hand over is held back to the end of the step, after the drafter's last pass, and handed on then, each
layer once. Nothing overwrites those rows within the step.

The cache is the same on every PCP rank. A connector that knows nothing of PCP would have all ranks write the same
files, so rank 0 alone publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pcp_passes.frontends.vllm import runtime as runtimes

#: Connectors that publish through ``save_kv_layer`` and nothing else. Others read the cache by block address whenever
#: they choose to, so holding back a call would not hold back a transfer.
_LAYERWISE = ("ExampleConnector",)


def refusal(config: Any) -> str | None:
    """Why this KV transfer is not supported; ``None`` when it is. A connector of the user's own
    (``kv_connector_module_path``) is taken to publish through ``save_kv_layer``."""
    transfer = config.kv_transfer_config
    if transfer is None:
        return None
    if transfer.kv_role != "kv_producer":
        return (
            f"KV transfer with kv_role={transfer.kv_role!r} is not supported; set it to 'kv_producer', or drop "
            "kv_transfer_config."
        )
    if transfer.kv_connector not in _LAYERWISE and transfer.kv_connector_module_path is None:
        return (
            f"KV transfer through {transfer.kv_connector} is not supported, since it may read the cache while a step "
            f"runs; use {' or '.join(_LAYERWISE)}, or drop kv_transfer_config."
        )
    stages = config.parallel_config.pipeline_parallel_size
    if stages > 1:
        return (
            f"KV transfer over pipeline_parallel_size={stages} stages would publish a prompt's first layers before the "
            "last stage, and the drafter there, have run it; drop kv_transfer_config, or set pipeline_parallel_size "
            "to 1."
        )
    return None


class HeldSaves:
    """Stands in for a connector's ``save_kv_layer`` during a step; the last call for each layer counts."""

    def __init__(self, connector: Any, publishes: bool) -> None:
        self.save: Callable[..., None] = connector.save_kv_layer
        self.wait: Callable[[], None] = connector.wait_for_save
        self.publishes = publishes
        self.calls: dict[str, tuple[Any, Any, dict[str, Any]]] = {}

    def __call__(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.calls[layer_name] = (kv_layer, attn_metadata, kwargs)

    def publish(self) -> None:
        """Make the calls, in the order in which the layers first ran, and wait for them. Stands in for
        ``wait_for_save``, which the runner calls when the drafter is done."""
        calls, self.calls = self.calls, {}
        for layer_name, (kv_layer, attn_metadata, kwargs) in calls.items() if self.publishes else ():
            self.save(layer_name, kv_layer, attn_metadata, **kwargs)
        self.wait()


def around_pre_forward(original: Callable[..., Any], active: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ActiveKVConnector.pre_forward``: hold back what this step's layers hand over."""
    runtime, connector = runtimes.current(), active.kv_connector
    if runtime is not None and runtime.pcp > 1:
        held = vars(connector).get("save_kv_layer")
        if isinstance(held, HeldSaves):
            held.calls.clear()  # left by a step that failed
        else:
            held = HeldSaves(connector, publishes=runtime.rank == 0)
            connector.save_kv_layer, connector.wait_for_save = held, held.publish
    return original(active, *args, **kwargs)
