# SPDX-License-Identifier: Apache-2.0
"""What a user may ask of the embedded engine, checked when it is built."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.layout.build import DECODES
from pcp_passes.mesh.axes import Mesh
from pcp_passes.mesh.combinations import require_allowed
from pcp_passes.options import unknown_choice
from pcp_passes.paged import SparseOptions
from pcp_passes.piecewise.buckets import Buckets
from pcp_passes.sparse.backends import AUTO, BACKENDS, DEFAULT_WORKSPACE_BYTES

#: The planner knows interleave too, but it makes every token an attention row of its own.
LAYOUTS = ("zigzag", "contiguous")

CACHE_DTYPES: dict[str, torch.dtype | None] = {"auto": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

GRAPH_MODES = ("none", "piecewise", "full_decode_only", "full_and_piecewise")
GRAPH_COMPILES = ("eager", "inductor")
GRAPH_COLLECTIVES = ("outside", "inside")
GRAPH_FIELDS = ("graph_compile", "graph_rows", "graph_requests", "graph_collectives", "graph_bytes")
DEFAULT_GRAPH_BYTES = 8 << 30

_COUNTS = ("pcp", "dp", "pp", "tp", "block_size", "num_blocks", "max_len", "max_requests", "budget", "graph_bytes")
_FLAGS = ("prefix_cache", "fast_prefill", "check_ranks", "fold_on_tp", "expert_parallel")

#: The published scenario drafts 5 tokens; beyond 8 the replicated draft steps cost more than they save.
MAX_STEPS = 8


@dataclass(frozen=True)
class SamplingParams:
    """How one request is continued.

    Attributes:
        max_tokens: tokens to generate, at least 1.
        temperature: 0 is greedy.
        seed: of the request's random streams. Draws depend on (seed, position) alone, never on the batch.
        eos: token ids that end the request; the token itself is part of the output.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    seed: int = 0
    eos: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be at least 1, found {self.max_tokens}; ask for a token or no request.")
        if not self.temperature >= 0.0:
            raise ConfigError(f"temperature must be at least 0 (greedy), found {self.temperature}.")


@dataclass(frozen=True)
class EngineOptions:
    """Sizes and policies of an engine. Every rank must be given the same.

    Attributes:
        pcp: ranks of the prefill-context-parallel group.
        block_size: tokens of a KV cache block.
        num_blocks: blocks of every rank's cache.
        max_len: largest prompt plus ``max_tokens`` of a request.
        max_requests: requests that run at a time.
        budget: tokens of a step, over all requests.
        long_prefill_threshold: tokens of one request's prefill in one step; 0 is no limit beside the budget.
        cache_dtype: of the KV caches: ``auto`` is the model's; ``bf16``; ``fp8``: latents and index keys of MLA layers
            as records with power-of-two scales, keys and values of other layers as e4m3, cast without a scale (values
            past 448 saturate). Records are packed before they are gathered.
        sparse_attention: back end of attention over selected keys, one of :mod:`pcp_passes.sparse.backends`; ``auto``
            takes the fastest that can.
        workspace_bytes: bound on the temporaries of one selection of keys, at least 64 MiB; 256 MiB by default.
            Results do not depend on it.
        layout: how a prefill is dealt to the ranks, ``zigzag`` or ``contiguous``.
        decode: ``replicate`` runs decodes on every rank (no collective in a pure decode step), ``owner`` on one.
        prefix_cache: reuse the blocks of equal prefixes.
        acceptance_floor: warn when the share of drafts that are accepted falls under it; None never warns.
        graph_mode: which body calls run as graphs, captured by ``Engine``'s warm-up. ``piecewise``: all, cut where
            attention, cache writes and collectives are; ``full_decode_only``: decode and draft steps, each as one
            graph, the others without; ``full_and_piecewise``: both. On CPU graphs are replayed by a checker.
        graph_compile: how the pieces run, ``eager`` or ``inductor``.
        graph_rows: buckets of piecewise graphs, rows of the fullest rank; derived from budget and pcp when None.
        graph_requests: buckets of decode and draft steps, requests; derived from max_requests when None.
        graph_collectives: ``outside`` the graphs, or ``inside``, which needs a group whose back end can be captured.
        graph_bytes: bound on what graphs keep on a rank. Large buckets are captured first; what no longer fits runs
            without a graph.
        fast_prefill: must be false.
        check_ranks: before each step, ranks of a real group compare what they know of the batch, tokens included: one
            collective of 8 bytes. Ranks that came to different tokens then stop by name instead of going on apart.
        dp: replicas of the engine. Independent ones, unless they share experts.
        pp: pipeline stages of a replica, each with the layers of its own; so many steps are in flight.
        tp: tensor-parallel ranks; only with ``fold_on_tp``.
        fold_on_tp: the pcp ranks *are* the tensor-parallel ranks: pcp equals tp, and no device is added.
        expert_parallel: each rank of a stage, over dp and pcp, holds its share of the experts. With several replicas
            all then step together (:mod:`pcp_passes.engine.lockstep`).
        silence_s: seconds without a heartbeat after which a rank counts as lost, 4 to 25.
    """

    pcp: int = 1
    block_size: int = 16
    num_blocks: int = 256
    max_len: int = 1024
    max_requests: int = 16
    budget: int = 256
    long_prefill_threshold: int = 0
    cache_dtype: str = "auto"
    sparse_attention: str = AUTO
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    layout: str = "zigzag"
    decode: str = "replicate"
    prefix_cache: bool = True
    acceptance_floor: float | None = None
    graph_mode: str = "none"
    graph_compile: str = "eager"
    graph_rows: tuple[int, ...] | None = None
    graph_requests: tuple[int, ...] | None = None
    graph_collectives: str = "outside"
    graph_bytes: int = DEFAULT_GRAPH_BYTES
    fast_prefill: bool = False
    check_ranks: bool = True
    dp: int = 1
    pp: int = 1
    tp: int = 1
    fold_on_tp: bool = False
    expert_parallel: bool = False
    silence_s: float = 12.0

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, found {value!r}.")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, found {getattr(self, name)!r}.")
        for name, unit in (("long_prefill_threshold", "tokens"), ("workspace_bytes", "bytes")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name} must be an integer, a number of {unit}, found {value!r}.")
        if self.long_prefill_threshold < 0:
            raise ConfigError(f"long_prefill_threshold must be at least 0, found {self.long_prefill_threshold}.")
        if self.cache_dtype not in CACHE_DTYPES:
            raise ConfigError(unknown_choice("cache_dtype", self.cache_dtype, tuple(CACHE_DTYPES)))
        if self.sparse_attention not in (AUTO, *BACKENDS):
            raise ConfigError(unknown_choice("sparse_attention", self.sparse_attention, (AUTO, *BACKENDS)))
        SparseOptions(self.sparse_attention, self.workspace_bytes)  # refuses a workspace that is too small
        if self.layout not in LAYOUTS:
            raise ConfigError(unknown_choice("layout", self.layout, LAYOUTS))
        if self.decode not in DECODES:
            raise ConfigError(unknown_choice("decode", self.decode, DECODES))
        self._check_graphs()
        require_allowed(
            self.mesh, frontend="embedded", expert_parallel=self.expert_parallel, graph_mode=self.graph_mode
        )
        if self.fast_prefill:
            raise ConfigError(
                "fast_prefill=True skips the cache rows of layers that reuse another's keys, which the gathered cache "
                "writes of the pcp ranks do not know; set fast_prefill=False."
            )
        number = isinstance(self.silence_s, (int, float)) and not isinstance(self.silence_s, bool)
        if not number or not 4 <= self.silence_s <= 25:
            raise ConfigError(
                f"silence_s must be 4 to 25 seconds (a loss is told within 30), found {self.silence_s!r}."
            )

    def _check_graphs(self) -> None:
        if self.graph_mode == "full":
            raise ConfigError(
                "graph_mode='full' would put batches with a prefill into one graph, but no graph holds their attention "
                "and collectives; use 'full_and_piecewise'."
            )
        for name, known in (
            ("graph_mode", GRAPH_MODES), ("graph_compile", GRAPH_COMPILES), ("graph_collectives", GRAPH_COLLECTIVES),
        ):  # fmt: skip
            if getattr(self, name) not in known:
                raise ConfigError(unknown_choice(name, getattr(self, name), known))
        for name in ("graph_rows", "graph_requests"):
            sizes = () if getattr(self, name) is None else getattr(self, name)
            try:
                Buckets(**{"rows": (), "requests": (), name.removeprefix("graph_"): sizes})
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from None
        if self.graph_mode != "none":
            return
        unused = [name for name in GRAPH_FIELDS if getattr(self, name) != getattr(type(self), name)]
        if unused:
            raise ConfigError(
                f"{', '.join(unused)} given, but graph_mode='none' has no graphs; set graph_mode to one of "
                f"{', '.join(GRAPH_MODES[1:])}, or leave them out."
            )

    @property
    def mesh(self) -> Mesh:
        """All ranks of the deployment."""
        return Mesh(dp=self.dp, pp=self.pp, pcp=self.pcp, tp=self.tp, fold_on_tp=self.fold_on_tp)

    @property
    def lockstep(self) -> bool:
        """Whether replicas meet in every step."""
        return self.expert_parallel and self.dp > 1

    @property
    def sparse(self) -> SparseOptions:
        """What the paged ops are told."""
        return SparseOptions(self.sparse_attention, self.workspace_bytes)

    def blocks_per_request(self, steps: int) -> int:
        """Blocks that the longest request may hold with ``steps`` drafts.

        The host's cursor runs at most ``2 * steps`` tokens past the last token that is kept: the drafts of the step in
        flight and those of the step being scheduled, whatever ``pp`` is (``scheduler.MOST_PENDING``). The drafter's
        later steps write ``steps`` positions more.
        """
        return -(-(self.max_len + 3 * steps) // self.block_size)

    def check(self, steps: int) -> None:
        """Refuse what cannot run with a drafter of ``steps`` drafts. Raises ConfigError, one sentence each."""
        if steps > MAX_STEPS:
            raise ConfigError(f"the drafter drafts {steps} tokens a step; at most {MAX_STEPS} are supported.")
        need = self.blocks_per_request(steps)
        if self.num_blocks < need:
            raise ConfigError(
                f"num_blocks={self.num_blocks} cannot hold one request of max_len={self.max_len} with {steps} drafts, "
                f"which needs {need} blocks of {self.block_size}; raise num_blocks or lower max_len."
            )
        if self.budget < 1 + steps:
            raise ConfigError(
                f"budget={self.budget} is below the {1 + steps} tokens of one verification with {steps} drafts; "
                "raise it."
            )

    def digest(self) -> str:
        """Stable hash of every option: part of the ranks' agreement at start."""
        plain: dict[str, Any] = asdict(self)
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
