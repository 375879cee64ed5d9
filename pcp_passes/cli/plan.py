# SPDX-License-Identifier: Apache-2.0
"""``pcp plan``: who holds which tokens of a batch, what is padded, what is replicated."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes.errors import ConfigError
from pcp_passes.layout import Batch, Layout, build_layout

_MAX_REQUESTS = 32
_MAX_SPANS = 4
_BAR = 24


def plan_json(
    lens: list[int],
    pcp: int,
    *,
    layout: str = "zigzag",
    decode: str = "replicate",
    computed: list[int] | None = None,
    decodes: int = 0,
) -> dict[str, Any]:
    """The layout of prefills of ``lens`` new tokens on contexts ``computed``, then ``decodes`` one-token decodes.

    A decode is shown with a context of one token. ``attention_pairs`` counts (query, key) pairs under the causal mask,
    the attention work of a rank. Positions count from the start of each sequence.

    Raises ConfigError for options, LayoutError for lengths, that cannot be laid out.
    """
    return _describe(_layout(lens, pcp, layout, decode, computed, decodes))


def render_plan(
    lens: list[int],
    pcp: int,
    *,
    layout: str = "zigzag",
    decode: str = "replicate",
    computed: list[int] | None = None,
    decodes: int = 0,
) -> RenderableType:
    """The same as :func:`plan_json` for a terminal: one table of ranks, one of requests (the first 32)."""
    plan = plan_json(lens, pcp, layout=layout, decode=decode, computed=computed, decodes=decodes)
    return Group(_summary(plan), _rank_table(plan), _request_table(plan))


def _layout(lens: list[int], pcp: int, layout: str, decode: str, computed: list[int] | None, decodes: int) -> Layout:
    contexts = [0] * len(lens) if computed is None else computed
    if len(contexts) != len(lens):
        raise ConfigError(
            f"computed gives one context length per prefill: found {len(contexts)} for {len(lens)} lengths."
        )
    if decodes < 0 or len(lens) + decodes == 0:
        raise ConfigError(f"A plan needs at least one prefill length or decode; found lens={lens}, decodes={decodes}.")
    batch = Batch(
        np.array([*lens, *[1] * decodes], dtype=np.int64),
        np.array([*contexts, *[1] * decodes], dtype=np.int64),
        np.array([*np.add(lens, contexts).tolist(), *[1] * decodes], dtype=np.int64),
    )
    return build_layout(batch, pcp, kind=layout, decode=decode)


def _describe(layout: Layout) -> dict[str, Any]:
    batch = layout.batch
    replicated = layout.replicated_requests
    position = batch.num_computed[layout.seg_request] + layout.seg_start - batch.query_start_loc[layout.seg_request]
    segments = [
        {"request": request, "position": first, "length": length, "written": not (replicated[request] and rank)}
        for rank, request, first, length in zip(
            layout.seg_rank.tolist(),
            layout.seg_request.tolist(),
            position.tolist(),
            layout.seg_length.tolist(),
            strict=True,
        )
    ]
    bounds = layout.row_offsets.tolist()
    ranks = []
    for rank, tokens in enumerate(layout.per_rank_tokens.tolist()):
        own = segments[bounds[rank] : bounds[rank + 1]]
        pairs = sum(s["length"] * s["position"] + s["length"] * (s["length"] + 1) // 2 for s in own)
        ranks.append(
            {
                "rank": rank,
                "tokens": tokens,
                "padding": layout.padded_tokens - tokens,
                "attention_rows": len(own),
                "attention_pairs": pairs,
                "segments": own,
            }
        )
    requests = [
        {
            "request": i,
            "kind": "prefill" if batch.is_prefilling[i] else "decode",
            "context": int(batch.num_computed[i]),
            "tokens": int(batch.num_scheduled[i]),
            "replicated": bool(replicated[i]),
        }
        for i in range(batch.num_requests)
    ]
    gathered = layout.pcp * layout.padded_tokens
    return {
        "pcp": layout.pcp,
        "layout": layout.kind,
        "decode": layout.decode,
        "tokens": layout.num_tokens,
        "padded_tokens": layout.padded_tokens,
        "padding_rows": gathered - int(layout.per_rank_tokens.sum()),
        "copied_rows": int(layout.per_rank_tokens.sum()) - layout.num_tokens,
        "body": "replicated" if layout.is_replicated else "sharded",
        "ranks": ranks,
        "requests": requests,
    }


def _summary(plan: dict[str, Any]) -> Text:
    gathered = plan["pcp"] * plan["padded_tokens"]
    share = 100 * plan["padding_rows"] / gathered if gathered else 0.0
    collectives = "no collective" if plan["body"] == "replicated" else "collectives"
    return Text(
        f"{plan['tokens']} tokens over {plan['pcp']} ranks, {plan['layout']}, decode {plan['decode']}: "
        f"{plan['padded_tokens']} rows per rank, {plan['padding_rows']} padding rows ({share:.1f} %), "
        f"{plan['copied_rows']} rows of replicated tokens; {plan['body']} body ({collectives})"
    )


def _rank_table(plan: dict[str, Any]) -> Table:
    table = Table(title="ranks", title_justify="left")
    for name in ("rank", "tokens", "padding", "attention rows", "attention"):
        table.add_column(name, justify="right")
    table.add_column("tokens / rows per rank")
    total = sum(rank["attention_pairs"] for rank in plan["ranks"])
    for rank in plan["ranks"]:
        filled = round(_BAR * rank["tokens"] / max(1, plan["padded_tokens"]))
        table.add_row(
            str(rank["rank"]),
            str(rank["tokens"]),
            str(rank["padding"]),
            str(rank["attention_rows"]),
            f"{100 * rank['attention_pairs'] / max(1, total):.1f} %",
            "█" * filled + "·" * (_BAR - filled),
        )
    return table


def _request_table(plan: dict[str, Any]) -> Table:
    shown = plan["requests"][:_MAX_REQUESTS]
    hidden = len(plan["requests"]) - len(shown)
    note = f"{hidden} more requests: see the JSON output" if hidden else None
    table = Table(title="positions held", title_justify="left", caption=note, caption_justify="left")
    for name in ("request", "kind", "context", "tokens"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for rank in range(plan["pcp"]):
        table.add_column(f"rank {rank}", overflow="fold")
    held: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for rank in plan["ranks"]:
        for segment in rank["segments"]:
            held.setdefault((segment["request"], rank["rank"]), []).append(segment)
    for request in shown:
        cells = [_spans(held.get((request["request"], rank), [])) for rank in range(plan["pcp"])]
        table.add_row(str(request["request"]), request["kind"], str(request["context"]), str(request["tokens"]), *cells)
    return table


def _spans(segments: list[dict[str, Any]]) -> str:
    """Positions of one request on one rank: ``0-7, 24-31``; ``1-61 step 4``; ``9 (copy)``; ``-`` for none."""
    if not segments:
        return "-"
    firsts = [segment["position"] for segment in segments]
    steps = set(np.diff(firsts).tolist())
    if len(segments) > 2 and len(steps) == 1 and all(segment["length"] == 1 for segment in segments):
        text = f"{firsts[0]}-{firsts[-1]} step {steps.pop()}"
    else:
        parts = [
            str(s["position"]) if s["length"] == 1 else f"{s['position']}-{s['position'] + s['length'] - 1}"
            for s in segments[:_MAX_SPANS]
        ]
        if len(segments) > _MAX_SPANS:
            parts.append(f"{len(segments) - _MAX_SPANS} more")
        text = ", ".join(parts)
    return text if segments[0]["written"] else f"{text} (copy)"
