# SPDX-License-Identifier: Apache-2.0
"""Which CUDA graph modes and sizes run with PCP, and which compiled sizes: one sentence each for what does not.

``PIECEWISE`` is accepted: its bookkeeping is checked by running vLLM on CPU with :mod:`.cpu_graphs`; no graph of it has
been captured on a card. It is never chosen for a user who set nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pcp_passes.errors import ConfigError
from pcp_passes.options import PcpOptions
from pcp_passes.piecewise.buckets import derive_buckets, largest_rows

logger = logging.getLogger(__name__)

#: Ops that write the cache. They take the gathered rows, so no compiled piece may hold them.
CACHE_WRITES = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")

_WHOLE = {
    "FULL": "puts attention and collectives of mixed batches into one graph, and both change with every batch",
    "FULL_DECODE_ONLY": "chooses a whole graph by the global number of requests, but under PCP the rows are rank-local",
    "FULL_AND_PIECEWISE": "chooses a whole graph by the global number of requests, but under PCP the rows are "
    "rank-local",
}


def most_rows(config: Any) -> int:
    """The most rows that a rank runs in one step, padding excluded."""
    return largest_rows(**_scheduled(config))


def most_replicated_rows(config: Any) -> int:
    """The most rows of a replicated step, padding excluded: all its requests decode, each its last token and drafts."""
    scheduled = _scheduled(config)
    return int(min(scheduled["budget"], scheduled["max_requests"] * (1 + scheduled["steps"])))


def up_to(sizes: Iterable[int], rows: int) -> list[int]:
    """The sizes, rising, that steps of at most ``rows`` rows take: up to the first that holds them all."""
    rising = sorted(sizes)
    return [size for index, size in enumerate(rising) if index == 0 or rising[index - 1] < rows]


def _scheduled(config: Any) -> dict[str, Any]:
    scheduler, speculative = config.scheduler_config, config.speculative_config
    return {
        "budget": scheduler.max_num_batched_tokens,
        "pcp": config.parallel_config.prefill_context_parallel_size,
        "max_requests": scheduler.max_num_seqs,
        "steps": 0 if speculative is None else int(speculative.num_speculative_tokens),
        "decode": _options(config).decode,
    }


def graph_mode(config: Any) -> str | None:
    """Whole graphs are refused, by mode."""
    mode = config.compilation_config.cudagraph_mode
    if mode is None or mode.name in ("NONE", "PIECEWISE"):
        return None
    why = _WHOLE[mode.name]
    return f"cudagraph_mode={mode.name} {why}; set it to PIECEWISE (with compilation mode 3), or to NONE."


def no_graphs_by_default(args: Any) -> None:
    """vLLM's own default on CUDA is a graph mode, which a user who set nothing should not be refused for."""
    from vllm.config import CUDAGraphMode

    if args.compilation_config.cudagraph_mode is None:
        args.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
        if asks_for_sizes(args):
            logger.info("pcp_passes: cudagraph_mode is NONE with PCP unless set to PIECEWISE; no size is captured")


def whole_graph_arguments(args: Any) -> str | None:
    """Asked before vLLM settles the configuration, because it would turn some of these modes into others by itself:
    what the user wrote is what is refused."""
    return None if args.prefill_context_parallel_size == 1 else graph_mode(args)


def graph_arguments(args: Any) -> str | None:
    """Asked before vLLM settles the configuration, because it would turn the mode off by itself."""
    compilation = args.compilation_config
    if args.prefill_context_parallel_size == 1 or not _piecewise(args):
        return None
    if compilation.mode is not None and int(compilation.mode) != 3:
        return (
            f"cudagraph_mode=PIECEWISE needs pieces, and compilation mode {int(compilation.mode)} makes none; set the "
            "mode to 3, or cudagraph_mode to NONE."
        )
    if compilation.splitting_ops is not None and not compilation.splitting_ops:
        return (
            "cudagraph_mode=PIECEWISE with splitting_ops=[] leaves attention inside the pieces, which a graph cannot "
            "replay for another batch; leave splitting_ops out."
        )
    if compilation.pass_config.fuse_attn_quant:
        return (
            "cudagraph_mode=PIECEWISE with pass_config.fuse_attn_quant=true puts attention inside the pieces, which a "
            "graph cannot replay for another batch; set fuse_attn_quant to false."
        )
    return None


def graph_drafter(config: Any) -> str | None:
    """Drafters whose passes are no part of the rewritten program were never run with graphs."""
    speculative = config.speculative_config
    if not _piecewise(config) or speculative is None:
        return None
    if speculative.method == "dspark":
        return "cudagraph_mode=PIECEWISE with method 'dspark' is not supported yet; set cudagraph_mode to NONE."
    if _options(config).drafter == "replicate":
        return (
            "cudagraph_mode=PIECEWISE with pcp_passes.drafter='replicate' is not supported; set pcp_passes.drafter to "
            "'shard', or cudagraph_mode to NONE."
        )
    return None


def compiled_sizes(config: Any) -> str | None:
    """Sizes that no step can have: someone took them for global tokens."""
    compilation, most = config.compilation_config, most_rows(config)
    # Those that are captured sizes too are settled with them.
    captured = compilation.cudagraph_capture_sizes or ()
    large = [size for size in compilation.compile_sizes or () if size > most and size not in captured]
    if not large:
        return None
    budget, pcp = config.scheduler_config.max_num_batched_tokens, config.parallel_config.prefill_context_parallel_size
    return (
        f"compile_sizes={large} are rows of one rank, which has at most {most} in a step (max_num_batched_tokens="
        f"{budget} over {pcp} ranks); divide tokens by the number of ranks, or drop them."
    )


def cut(config: Any, own: tuple[str, ...]) -> None:
    """Complete the list of splitting ops: attention and cache writes, whose inputs have another size than a rank's rows
    or change with every batch, and ``own``. A list that the user gave may lack any of them."""
    compilation = config.compilation_config
    ops = list(compilation.splitting_ops or ())
    if ops and _piecewise(config):
        own = (*compilation._attention_ops, *own)
    compilation.splitting_ops = ops + [op for op in dict.fromkeys((*CACHE_WRITES, *own)) if op not in ops]


def asks_for_sizes(args: Any) -> bool:
    """Whether the user names the sizes to capture."""
    compilation = args.compilation_config
    return any(
        getattr(owner, name) is not None
        for owner in (args, compilation)
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    )


def settle_sizes(config: Any, asked: bool) -> None:
    """The sizes to capture, which vLLM counts in global tokens, in rows of one rank: of those that the user ``asked``
    for, the ones that some step can have and the smallest above; else the buckets of
    :func:`~pcp_passes.piecewise.buckets.derive_buckets`.

    Raises:
        ConfigError: vLLM dropped all that the user asked for.
    """
    if not _piecewise(config):
        return
    compilation, most = config.compilation_config, most_rows(config)
    before = sorted(compilation.cudagraph_capture_sizes or ())
    if asked and not before:
        budget = config.scheduler_config.max_num_batched_tokens
        raise ConfigError(
            f"cudagraph_mode=PIECEWISE with no size to capture of at most max_num_batched_tokens={budget} would run "
            "without graphs; name smaller cudagraph_capture_sizes, or leave them out."
        )
    if asked:
        after = up_to(before, most)
    else:
        # The last is rounded up, and buffers hold the token budget.
        rows, budget = derive_buckets(**_scheduled(config)).rows, config.scheduler_config.max_num_batched_tokens
        after = sorted({min(size, budget) for size in rows})
    if after == before:
        return
    compiled = set(compilation.compile_sizes or ())
    more = set(after) if before and compiled >= set(before) else set()  # "cudagraph_capture_sizes", spelt out by vLLM
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = after, after[-1]
    compilation.compile_sizes = sorted(compiled - (set(before) - set(after)) | more)
    logger.info("pcp_passes: a rank has at most %d rows in a step; captured sizes: %s", most, after)


def _piecewise(config: Any) -> bool:
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.name == "PIECEWISE"


def _options(config: Any) -> PcpOptions:
    return PcpOptions.parse(config.additional_config["pcp_passes"])
