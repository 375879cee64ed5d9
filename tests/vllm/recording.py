# SPDX-License-Identifier: Apache-2.0
"""vLLM's example connector, made to note what the drafter's cache held whenever a layer was published."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector
from vllm.forward_context import is_forward_context_available

from pcp_passes.frontends.vllm import kv_transfer


class RecordingConnector(ExampleConnector):  # type: ignore[misc]
    """Notes, per published layer: its name, whether a forward was running, and for each stored prompt its length and
    how many of its rows the drafter's cache lacked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caches: dict[str, torch.Tensor] = {}
        self.seen: list[dict[str, Any]] = []

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = dict(kv_caches)

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        drafter = self.caches[max(self.caches, key=_layer_number)]
        rows = drafter.reshape(-1, drafter.shape[-1])
        stored = [r for r in self._get_connector_metadata().requests if r.is_store and len(r.slot_mapping)]
        missing = [int((rows[r.slot_mapping] == 0).all(dim=1).sum()) for r in stored]
        if stored:
            self.seen.append(
                {
                    "layer": layer_name,
                    "in_forward": is_forward_context_available(),
                    "lengths": [len(r.slot_mapping) for r in stored],
                    "missing": missing,
                }
            )
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)


def _layer_number(name: str) -> int:
    """The drafter's layers come after the target's."""
    return int(name.split("layers.")[1].split(".")[0])


def seen(worker: Any) -> list[dict[str, Any]]:
    """What was published since the last call, on this worker."""
    connector = get_kv_transfer_group()
    found: list[dict[str, Any]] = connector.seen
    connector.seen = []
    return found


def layers(worker: Any) -> list[str]:
    """Names of the cached layers, the drafter's last."""
    return sorted(get_kv_transfer_group().caches, key=_layer_number)


def publish_at_once(worker: Any) -> None:
    """The fault: layers are published as they run."""

    def call(self: Any, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.save(layer_name, kv_layer, attn_metadata, **kwargs)

    kv_transfer.HeldSaves.__call__ = call  # type: ignore[method-assign]


def clear_drafter_cache(worker: Any) -> None:
    """Forget earlier prompts, whose rows a new prompt's blocks could still show."""
    connector = get_kv_transfer_group()
    connector.caches[max(connector.caches, key=_layer_number)].zero_()


def qualified(function: Any) -> str:
    """The name by which a session calls one of these."""
    return f"{__name__}:{function.__name__}"
