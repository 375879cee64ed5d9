# SPDX-License-Identifier: Apache-2.0
"""A paged KV cache for unmodified models of transformers.

A step stacks the rows of many requests along the token dimension of a batch of one, as vLLM does: prefill chunks and
single decode rows side by side, no padding between them::

    cache = PagedKVCache(model.config, num_blocks=64, block_size=16, dtype=torch.float32)
    with pcp_attention(model):
        inputs = cache.begin_step(StepInputs(slots, block_tables, query_start_loc, seq_lens, positions))
        logits = model(token_ids[None], **inputs).logits[0]     # [N, vocabulary]

Each layer's rows are written by ``pcp::write_cache``. What ``update`` hands back to the model is then read by one
``pcp::paged_attend``, and is one of two views:

* *paged*: the cache itself, seen as ``[1, H, num_blocks * block_size, D]``; no copy, read by block table. Whatever a
  model does to single key rows after the update (a cast, a norm) it does to this view as well.
* *gathered*: the rows of the step's requests, one request after the other, for models that expand their keys after the
  update (MLA caches a latent): expanding the whole cache would cost more than a gather.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal

import torch
from transformers import masking_utils
from transformers.cache_utils import Cache, CacheLayerMixin

from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.frontends.transformers.attention import STEP_ARGUMENT
from pcp_passes.frontends.transformers.masks import MaskPattern
from pcp_passes.paged.explicit import paged_attend, write_cache

_KINDS = frozenset(("full_attention", "sliding_attention", "chunked_attention"))

Read = Literal["auto", "paged", "gathered"]


@dataclass(frozen=True, eq=False)
class StepInputs:
    """Where the rows of one step go and what they read: N rows of R requests.

    A request may appear more than once, with rows of its own each time.
    """

    slots: torch.Tensor
    """i64 ``[N]``: the slot of each row, ``block * block_size + row in block``; -1 is not written."""
    block_tables: torch.Tensor
    """i32 or i64 ``[R, max_blocks]``: blocks of each request in position order; not read past the last one needed."""
    query_start_loc: torch.Tensor
    """i32 or i64 ``[R + 1]``: first row of each request, and the end of the last; rows after that are padding."""
    seq_lens: torch.Tensor
    """i32 or i64 ``[R]``: keys of each request in the cache once this step's rows are written."""
    positions: torch.Tensor
    """i64 ``[N]``: position of each row within its request."""

    def __post_init__(self) -> None:
        rows, requests = self.slots.shape[0], self.seq_lens.shape[0]
        wrong = [
            f"{name} is {list(found.shape)}, required {list(required)}"
            for name, found, required in (
                ("slots", self.slots, (rows,)),
                ("positions", self.positions, (rows,)),
                ("seq_lens", self.seq_lens, (requests,)),
                ("query_start_loc", self.query_start_loc, (requests + 1,)),
                ("block_tables", self.block_tables, (requests, self.block_tables.shape[-1])),
            )
            if tuple(found.shape) != tuple(required)
        ]
        wrong += [
            f"{name} is {getattr(self, name).dtype}, required torch.int64"
            for name in ("slots", "positions")
            if getattr(self, name).dtype != torch.int64
        ]
        wrong += [
            f"{field.name} is {getattr(self, field.name).dtype}, required an integer type"
            for field in fields(self)
            if getattr(self, field.name).dtype not in (torch.int32, torch.int64)
        ]
        if wrong:
            raise ConfigError(f"step inputs: {'; '.join(wrong)}. Give N rows and R requests throughout.")


class PagedStep:
    """One step over one cache: what an attention layer is handed as ``pcp_step``."""

    def __init__(self, cache: PagedKVCache, inputs: StepInputs) -> None:
        self.cache = cache
        self.inputs = inputs

    @cached_property
    def gathered(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of all rows that the step reads, i64 ``[S]``, and the table of where each request's went.

        Reads ``seq_lens`` on the host, once per step.
        """
        size = self.cache.block_size
        lengths = self.inputs.seq_lens.tolist()
        tables = self.inputs.block_tables.long()
        if max(lengths, default=0) > tables.shape[1] * size:
            raise ConfigError(
                f"a request has {max(lengths)} keys, but {tables.shape[1]} blocks of {size}. Widen block_tables."
            )
        rows = torch.arange(max(lengths, default=0), device=tables.device)
        slots = [tables[r, rows[:n] // size] * size + rows[:n] % size for r, n in enumerate(lengths)]
        starts = self.inputs.seq_lens.long().cumsum(0) - self.inputs.seq_lens.long()
        return torch.cat(slots) if slots else rows, starts[:, None] + rows[None, :]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: MaskPattern,
        scale: float | None,
        softcap: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of ``[1, Hq, N, D]`` over what ``update`` returned; ``[1, N, Hq, Dv]``."""
        inputs, cache = self.inputs, self.cache
        if self is not cache.step:
            raise PcpError("this step is over: another was begun on its cache. Pass what the last begin_step returned.")
        cache.unread = None
        table, size = (inputs.block_tables, cache.block_size) if cache.read == "paged" else (self.gathered[1], 1)
        out = paged_attend(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1).unflatten(0, (-1, size)),
            value[0].transpose(0, 1).unflatten(0, (-1, size)),
            table,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.positions,
            scale=scale, left=pattern.left, right=pattern.right, chunk=pattern.chunk,
            sinks=None if sinks is None else sinks.reshape(-1), softcap=softcap,
        )  # fmt: skip
        return out[None]


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """``keys`` and ``values`` of one layer, ``[num_blocks, block_size, H, D]`` each, made when first written."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, cache: PagedKVCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate for states ``[1, H, N, D]``. Zeros, so that no unwritten row can hold a NaN."""
        made = [
            torch.zeros(
                self.cache.num_blocks, self.cache.block_size, states.shape[1], states.shape[3],
                dtype=self.cache.dtype, device=self.cache.device,
            )
            for states in (key_states, value_states)
        ]  # fmt: skip
        self.keys, self.values = made
        for blocks in made:
            # Their sizes never change; a tracer that shares symbols between equal sizes would tie them to a batch.
            torch._dynamo.mark_static(blocks)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the step's rows; return the view that attention reads. States are ``[1, H, N, D]``."""
        step = self.cache.step
        if step is None:
            raise PcpError("the paged cache was written outside a step; call begin_step and pass on what it returns")
        if key_states.shape[0] != 1 or key_states.shape[2] != step.inputs.slots.shape[0]:
            raise ConfigError(
                f"found states for a batch of {key_states.shape[0]} with {key_states.shape[2]} rows; required a batch "
                f"of 1 with the step's {step.inputs.slots.shape[0]} rows. Stack requests along the token dimension."
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        write_cache(_rows(key_states), _rows(value_states), self.keys, self.values, step.inputs.slots)
        return self._view(self.keys, step).to(key_states.dtype), self._view(self.values, step).to(value_states.dtype)

    def _view(self, blocks: torch.Tensor, step: PagedStep) -> torch.Tensor:
        rows = blocks.flatten(0, 1)
        if self.cache.read == "gathered":
            rows = rows.index_select(0, step.gathered[0])
        return rows.transpose(0, 1)[None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask states a window only; lengths and positions of a step are not those of a dense cache."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """0: requests have lengths, the cache has none. A model that is given positions does not use it."""
        return 0

    def get_max_length(self) -> int:
        """Rows that the layer holds, over all requests."""
        return self.cache.num_blocks * self.cache.block_size


class PagedKVCache(Cache):  # type: ignore[misc]
    """Paged keys and values of all layers of a model.

    A layer's blocks are allocated when it is first written, in the shape that the model writes; their addresses stay
    the same from then on. To know the size beforehand, run one row with slot -1 over a cache of one block and read
    :attr:`bytes_per_block`.

    Args:
        config: configuration of the model.
        num_blocks, block_size: blocks, and rows in each.
        dtype, device: of the cache; keys and values are read back in the model's dtype.
        read: how attention reads, see the module's text; ``"auto"`` gathers for MLA and is paged for all else.

    Raises:
        ConfigError: a layer keeps something else than keys and values (a recurrent state, an index), or a size is
            not positive.
    """

    def __init__(
        self,
        config: Any,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        read: Read = "auto",
    ) -> None:
        config = config.get_text_config(decoder=True)
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        unknown = sorted({kind for kind in kinds if kind not in _KINDS})
        if unknown or getattr(config, "index_topk", None) is not None:
            raise ConfigError(
                f"a paged cache holds keys and values only; found layers of type {', '.join(unknown) or 'indexer'} in "
                f"{type(config).__name__}. Use the model's own cache."
            )
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"found {num_blocks} blocks of {block_size} rows; required at least one of each")
        if read not in ("auto", "paged", "gathered"):
            raise ConfigError(f"read={read!r}; required 'auto', 'paged' or 'gathered'")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        latent = getattr(config, "kv_lora_rank", None) is not None
        self.read = ("gathered" if latent else "paged") if read == "auto" else read
        self.step: PagedStep | None = None
        self.unread: int | None = None
        """Layer whose update no attention has read yet."""
        super().__init__(layers=[PagedLayer(self) for _ in kinds])

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block takes over all layers written so far."""
        held = [blocks for layer in self.layers if layer.is_initialized for blocks in (layer.keys, layer.values)]
        return sum(blocks[0].numel() * blocks.element_size() for blocks in held)

    def begin_step(self, inputs: StepInputs) -> dict[str, Any]:
        """Start a step; the keyword arguments to call the model with, beside its token ids ``[1, N]``.

        Raises:
            PcpError: the attention of the step before did not read what it wrote.
            ConfigError: inputs on another device than the cache.
        """
        self._require_read()
        if inputs.slots.device != self.device:
            raise ConfigError(f"the step is on {inputs.slots.device}, the cache on {self.device}; move one of them")
        self.step = PagedStep(self, inputs)
        return {
            "position_ids": inputs.positions[None],
            _CACHE_ARGUMENT: self,
            "use_cache": True,
            STEP_ARGUMENT: self.step,
        }

    def end_step(self) -> None:
        """End the step: forget its tensors. Beginning the next one ends it as well.

        Raises:
            PcpError: as :meth:`begin_step`.
        """
        self._require_read()
        self.step = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write one layer's rows; called by the model."""
        self._require_read()
        view: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(key_states, value_states)
        self.unread = layer_idx
        return view

    def _require_read(self) -> None:
        """The model attends over the view that ``update`` returned only if its attention got the step."""
        if self.unread is not None:
            layer, self.unread = self.unread, None
            raise PcpError(
                f"layer {layer} wrote the paged cache, but its attention did not read it by block table: its result is "
                "wrong. Call the model inside pcp_attention(model), with all that begin_step returned; a model that "
                "does not hand keyword arguments to its attention cannot use this cache."
            )

    def reset(self) -> None:
        """Zero all blocks and forget the step."""
        self.step, self.unread = None, None
        super().reset()


def _rows(states: torch.Tensor) -> torch.Tensor:
    """``[1, H, N, D]`` as token rows ``[N, H, D]``."""
    return states[0].transpose(0, 1)


# The same release that renamed the models' argument renamed this one's.
_CACHE_ARGUMENT = (
    "cache" if "cache" in inspect.signature(masking_utils.create_causal_mask).parameters else "past_key_values"
)
