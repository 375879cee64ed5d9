# SPDX-License-Identifier: Apache-2.0
"""Experts of a captured model, by layer, and the part of them that one rank of an expert-parallel group holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.ir import rules
from pcp_passes.mesh.experts import shard_range
from pcp_passes.paged.routed import LOCAL_EXPERTS, ExpertShard
from pcp_passes.passes.bodies.dispatch_experts import EXPERTS, experts_layer, weight_of

if TYPE_CHECKING:
    from pcp_passes.engine.bodies import Model


def shard_experts(
    model: Model | None, ep_rank: int, ep_size: int, *, layers: Iterable[str] | None = None, copy: bool = False
) -> dict[str, ExpertShard]:
    """What ``PagedCaches.experts`` of a rank holds of one model.

    Ranks count in the flattened order of the mesh's ``ep`` groups: ``(dp, pcp, tp)``, the last fastest.

    Args:
        model: captured; ``None``, or one without experts, gives nothing.
        ep_rank, ep_size: of the rank within its pipeline stage.
        layers: only these layers, by name (of a stage: :func:`expert_layers`).
        copy: own memory instead of views on the model's parameters, so that they may be freed.

    Raises:
        ConfigError: a rank that is none of the group, or a layer that the model does not have.
    """
    if not 0 <= ep_rank < ep_size:
        raise ConfigError(f"expert-parallel rank {ep_rank} of {ep_size}; required 0 to {ep_size - 1}")
    known = {} if model is None else _weights(model)
    wanted = list(known) if layers is None else list(layers)
    if unknown := [layer for layer in wanted if layer not in known]:
        raise ConfigError(f"no experts {', '.join(unknown)} were captured; there are {', '.join(known) or 'none'}")
    shards: dict[str, ExpertShard] = {}
    for layer in wanted:
        gate_up, down = known[layer]
        total = gate_up.shape[0]
        first, count = shard_range(total, ep_rank, ep_size)
        own = [held.detach().narrow(0, first, count) for held in (gate_up, down)]
        own = [held.clone() for held in own] if copy else own
        shards[layer] = ExpertShard(own[0], own[1], first, total)
    return shards


def expert_layers(body: fx.GraphModule) -> tuple[str, ...]:
    """Names of the experts that a body with dispatched experts reads, in order."""
    nodes = (node for node in body.graph.nodes if rules.op_name(node) == LOCAL_EXPERTS)
    return tuple(dict.fromkeys(str(rules.layer_of(node)) for node in nodes))


def _weights(model: Model) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for graph in model.captured.values():
        for node in graph.graph.nodes:
            if rules.op_name(node) == EXPERTS:
                layer = experts_layer(node, model.name)
                found[layer] = weight_of(graph, node, 3), weight_of(graph, node, 4)
    return found
