# SPDX-License-Identifier: Apache-2.0
"""The MTP layer of DeepSeek and GLM checkpoints as a drafter for the embedded engine.

transformers leaves ``model.layers.{num_hidden_layers}.*`` of these checkpoints out. The layer is a decoder layer of the
target's own class between a projection of (token, hidden state) and a norm::

    x = eh_proj(cat(enorm(embed(token)), hnorm(hidden)))     embed is 0 at position 0
    out = shared_head.norm(layer(x))                         what the head reads, and what the next step is fed

``hidden`` is the target's state after its final norm. Embedding and head are the target's. As vLLM has it. On the last
of several pipeline stages there is no target's embedding: there the layer needs the copy that its checkpoint may hold.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from pcp_passes.engine.bodies import Model, make_bodies, prepare
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.transformers.paged import CapturedCache, paged_capture
from pcp_passes.frontends.transformers.target import example_rows
from pcp_passes.passes import PassContext

SHARED = "replicated_shared"


def load_mtp(
    model: Any,
    tensors: Mapping[str, torch.Tensor] | Path | str,
    *,
    ctx: PassContext,
    share_topk: bool = False,
    own_embedding: bool = False,
) -> Model:
    """Capture the MTP layer that belongs to ``model``.

    Args:
        model: the target, as :func:`~pcp_passes.frontends.transformers.load_target` takes it.
        tensors: the layer's tensors by their names in the checkpoint, or the checkpoint's folder.
        ctx: axis and size of the bodies.
        share_topk: let the bodies return their top-k, and make one that takes it (layers with a sparse indexer).
        own_embedding: read the layer's own ``embed_tokens.weight`` from the checkpoint instead of the target's table,
            for a drafter on the last of several pipeline stages.

    Returns:
        bodies ``(ids i64[N], positions i64[N], hidden [N, H]) -> hidden [N, H]``. With ``share_topk`` they return a
        tuple of it and the top-k, i32 ``[N, k]``, and ``"replicated_shared"`` takes ``(ids, positions, hidden, topk)``
        and returns the hidden states alone: it reads the keys of ``topk`` and, always, the row's own; it writes no
        index key. (vLLM's later steps read the first step's selection without their own position.) The cache layer is
        ``"drafter.0"``.

    Raises:
        ConfigError: a checkpoint without an MTP layer, with more than one, or whose tensors are not the layer's;
            ``share_topk`` without a sparse indexer; ``own_embedding`` where the checkpoint has no such table.
        Refusal: as :func:`~pcp_passes.frontends.transformers.load_target`.
    """
    config = model.config
    count = getattr(config, "num_nextn_predict_layers", None) or 0
    if count > 1:
        raise ConfigError(
            f"found num_nextn_predict_layers={count}; required 1: a drafter of several MTP modules is not supported"
        )
    layer = MTPLayer(model, own_embedding=own_embedding)
    where = "the tensors given" if isinstance(tensors, Mapping) else str(tensors)
    stored = tensors if isinstance(tensors, Mapping) else read_layer(tensors, config.num_hidden_layers)
    load_layer(layer, stored, where)
    head = model.get_output_embeddings()
    layer.to(device=head.weight.device, dtype=head.weight.dtype).eval()
    topk = int(getattr(config, "index_topk", None) or 0)
    if share_topk and not topk:
        raise ConfigError(f"share_topk needs a sparse indexer, and {type(model).__name__} has none")
    ids = torch.zeros(example_rows(config), dtype=torch.int64, device=head.weight.device)
    hidden = torch.zeros(len(ids), config.hidden_size, dtype=head.weight.dtype, device=head.weight.device)
    with paged_capture(layer):
        layer.returns_topk = share_topk
        captured = {"": prepare(layer, (ids, ids, hidden))}
        if share_topk:
            chosen = torch.zeros(len(ids), topk, dtype=torch.int32, device=ids.device)
            captured[SHARED] = prepare(_GivenTopk(layer), (ids, ids, hidden, chosen))
    return Model(
        name="drafter",
        source=f"MTP of {type(model).__name__}",
        bodies=make_bodies(captured, ctx),
        head=head,
        hidden_size=config.hidden_size,
        vocab_size=head.weight.shape[0],
        layers=("drafter.0",),
        dtype=head.weight.dtype,
        topk=topk if share_topk else 0,
        captured=captured,
    )


class MTPLayer(nn.Module):
    """The layer, built from the target's own classes; parameters are named as in the checkpoint, below the layer."""

    def __init__(self, model: Any, *, own_embedding: bool = False) -> None:
        super().__init__()
        decoder: Any = model.get_decoder()
        count = model.config.num_hidden_layers
        self.config = _longer(model.config)
        norm, size = type(decoder.norm), self.config.hidden_size
        eps = self.config.rms_norm_eps
        self.index = count
        self.enorm = norm(size, eps=eps)
        self.hnorm = norm(size, eps=eps)
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self.block = type(decoder.layers[-1])(self.config, count)
        self.shared_head = nn.ModuleDict({"norm": norm(size, eps=eps)})
        self.own_embedding = own_embedding
        self.embed_tokens = copy.deepcopy(decoder.embed_tokens) if own_embedding else decoder.embed_tokens
        self.rotary_emb = decoder.rotary_emb
        self.returns_topk = False

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """``(i64[N], i64[N], [N, H])`` to ``[N, H]``, and the top-k where :attr:`returns_topk` is set."""
        taken: list[torch.Tensor] = []
        hook = None
        if self.returns_topk:
            indexer: Any = self.block.self_attn.indexer
            hook = indexer.register_forward_hook(lambda module, args, result: taken.append(result))
        try:
            out = self.run(ids, positions, hidden)
        finally:
            if hook is not None:
                hook.remove()
        return (out, taken[0][0]) if taken else out

    def run(self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        token = torch.where((positions == 0)[:, None], 0.0, self.embed_tokens(ids))
        x = self.eh_proj(torch.cat([self.enorm(token), self.hnorm(hidden)], dim=-1))[None]
        mask = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=ids.device) if _sparse(self.config) else None
        cache = CapturedCache("drafter", first=self.index)
        result = self.block(
            x,
            attention_mask=mask,
            position_embeddings=self.rotary_emb(x, position_ids=positions[None]),
            **cache.call_arguments(positions),
        )
        out: torch.Tensor = self.shared_head["norm"](result if isinstance(result, torch.Tensor) else result[0])
        return out[0]


class _GivenTopk(nn.Module):
    """The layer with a selection from outside in the place of its indexer's."""

    def __init__(self, layer: MTPLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, topk: torch.Tensor
    ) -> torch.Tensor:
        # A row of a later step stands behind everything that was selected, so its own position is never there twice.
        chosen = torch.cat([topk, positions[:, None].to(torch.int32)], dim=1)[None]
        with _indexer_gives(self.layer.block.self_attn, chosen):
            return self.layer.run(ids, positions, hidden)


@contextmanager
def _indexer_gives(attention: Any, chosen: torch.Tensor) -> Iterator[None]:
    """Answer calls of the attention's indexer with ``chosen``, ``[1, N, k]``."""
    indexer = attention.indexer
    indexer.forward = lambda *args, **kwargs: chosen
    try:
        yield
    finally:
        del indexer.forward


def _sparse(config: Any) -> bool:
    return bool(getattr(config, "index_topk", None))


def _longer(config: Any) -> Any:
    """The configuration with one decoder layer more, of the last kind and with an indexer of its own."""
    longer = copy.deepcopy(config)
    longer.num_hidden_layers += 1
    for name, kind in (("indexer_types", "full"), ("mlp_layer_types", None), ("layer_types", None)):
        kinds = getattr(longer, name, None)
        if kinds:
            setattr(longer, name, [*kinds, kind or kinds[-1]])
    return longer


def read_layer(folder: Path | str, layer: int) -> dict[str, torch.Tensor]:
    """Tensors ``model.layers.{layer}.*`` of a checkpoint in safetensors files.

    Raises:
        ConfigError: the folder holds no such tensor.
    """
    prefix = f"model.layers.{layer}."
    found: dict[str, torch.Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as held:
            names: list[str] = list(held.keys())
            found.update({name: held.get_tensor(name) for name in names if name.startswith(prefix)})
    if not found:
        raise ConfigError(
            f"{folder} holds no tensor {prefix}*; required a checkpoint with an MTP layer behind the last"
        )
    return found


def load_layer(layer: MTPLayer, tensors: Mapping[str, torch.Tensor], where: str = "this checkpoint") -> None:
    """Fill the layer; every tensor of it must be given, and every given one used.

    The checkpoint holds experts one by one; here they are stacked, gate above up, as the target's class has them. Its
    own copies of the target's embedding and head, which some checkpoints carry, are left out; a layer with an embedding
    of its own takes that one.

    Raises:
        ConfigError: names that are missing or that nobody reads, a shape that does not fit, or no table for a layer
            that has its own.
    """
    prefix = f"model.layers.{layer.index}."
    given = {name.removeprefix(prefix): held for name, held in tensors.items() if name.startswith(prefix)}
    given.pop("shared_head.head.weight", None)
    table = given.pop("embed_tokens.weight", None)
    if layer.own_embedding:
        own_table = layer.embed_tokens.weight
        if table is None or table.shape != own_table.shape:
            found = "no such tensor" if table is None else f"{list(table.shape)}"
            raise ConfigError(
                f"the drafter needs an embedding of its own, {prefix}embed_tokens.weight of {where}: found "
                f"{found}, required {list(own_table.shape)}. Use a checkpoint that has it, or run with pp=1, where the "
                "drafter reads the target's table"
            )
        with torch.no_grad():
            own_table.copy_(table)
    missing: list[str] = []
    state = {name: held for name, held in layer.state_dict().items() if not name.startswith(("embed_tokens", "rotary"))}
    with torch.no_grad():
        for name, own in state.items():
            stored = _stored(name.removeprefix("block."), own, given)
            if stored is None or stored.shape != own.shape:
                missing.append(f"{name} {list(own.shape)}")
            else:
                own.copy_(stored)
    if missing or given:
        raise ConfigError(
            f"the MTP layer {prefix}* of this checkpoint does not fit {type(layer.block).__name__}: missing "
            f"{', '.join(missing) or 'nothing'}; not read {', '.join(sorted(given)) or 'nothing'}. Use the checkpoint "
            "of the target."
        )


def _stored(name: str, own: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Take what belongs to a parameter out of ``given``."""
    if name in given:
        return given.pop(name)
    base, _, leaf = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
    if parts is None or own.dim() != 3 or not base.endswith("experts"):
        return None
    names = [[f"{base}.{expert}.{part}.weight" for part in parts] for expert in range(own.shape[0])]
    if any(one not in given for row in names for one in row):
        return None
    return torch.stack([torch.cat([given.pop(one) for one in row]) for row in names])
