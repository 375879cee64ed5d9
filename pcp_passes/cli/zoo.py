# SPDX-License-Identifier: Apache-2.0
"""``pcp zoo``: shard tiny models of transformers on simulated ranks, and compare their logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from rich import box
from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes.errors import ConfigError

Row = dict[str, Any]
_EXPLAINED = (
    "error: largest, over the largest logit. At T=64 and P=4, FLOPs of products: sharded: those that no rank repeats, "
    "of all but the ones that a gather choice repeats; rank: those of one rank, of the model's; coll: collectives. "
    "fell: ops on activations that every rank runs on all tokens. graphs: of Dynamo, and how often one was compiled."
)
_STYLE = {"exact": "green", "replicated": "yellow", "mixed": "yellow", "refused": "yellow", "skipped": "dim"}


def run_zoo(
    types: Sequence[str],
    *,
    everything: bool = False,
    pcp: Sequence[int] = (2, 3, 4),
    lengths: Sequence[int] | None = None,
    unknown: str = "refuse",
    jobs: int = 1,
    timeout: float = 600.0,
    progress: Callable[[Row, int, int], None] = lambda row, done, total: None,
) -> dict[str, Any]:
    """Check types, each in its own process.

    Args:
        types: model types; by default the chosen ones.
        everything: all causal language models of the installed transformers instead.
        pcp, lengths: numbers of ranks, and prompt lengths; by default those that suit each model.
        unknown: as in :class:`~pcp_passes.frontends.torch.options.TorchOptions`.
        jobs: processes at a time.
        timeout: seconds for one type.
        progress: hears each row, and how many of how many are done.

    Returns:
        ``rows`` in the order of ``types``, ``counts`` by verdict, ``failed`` types, and versions.

    Raises:
        ConfigError: transformers is not installed, or a type, a length or a number of ranks makes no sense.
    """
    if find_spec("transformers") is None:
        raise ConfigError("pcp zoo needs transformers, which is not installed: pip install transformers.")
    import torch
    import transformers

    from pcp_passes.zoo import models, row
    from pcp_passes.zoo.children import Limits, run_children

    if everything and types:
        raise ConfigError(f"--all runs every type; found {', '.join(types)} beside it. Give one of the two.")
    names = models.all_types() if everything else list(types) or list(models.recipes())
    for name in names:
        models.recipe(name)
    plan = row.Plan(_ranks(pcp), _lengths(lengths), _unknown(unknown))
    rows: list[Row] = []
    for found in run_children(names, row.work(plan), row.died, jobs=jobs, limits=Limits(seconds=timeout)):
        rows.append(found)
        progress(found, len(rows), len(names))
    rows.sort(key=lambda found: names.index(found["type"]))
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pcp": list(plan.pcp),
        "lengths": list(plan.lengths) if plan.lengths else None,
        "unknown": plan.unknown,
        "counts": dict(Counter(found["verdict"] for found in rows)),
        "failed": row.failed(rows),
        "rows": rows,
    }


def _ranks(pcp: Sequence[int]) -> tuple[int, ...]:
    if not pcp or any(ranks < 2 for ranks in pcp):
        raise ConfigError(f"--pcp lists numbers of ranks, each at least 2; found {list(pcp)}.")
    return tuple(dict.fromkeys(pcp))


def _lengths(lengths: Sequence[int] | None) -> tuple[int, ...] | None:
    if lengths is not None and (not lengths or any(not 2 <= length <= 512 for length in lengths)):
        raise ConfigError(f"--lengths lists prompt lengths from 2 to 512; found {list(lengths)}.")
    return tuple(dict.fromkeys(lengths)) if lengths else None


def _unknown(unknown: str) -> Any:
    if unknown not in ("refuse", "replicate"):
        raise ConfigError(f"--unknown is refuse or replicate; found {unknown!r}.")
    return unknown


def render_zoo(result: dict[str, Any]) -> RenderableType:
    """The table, then what each type that is not plainly exact has to say."""
    title = f"transformers {result['transformers']}, torch {result['torch']}, P = {_listed(result['pcp'])}"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("type", "verdict"):
        table.add_column(heading, no_wrap=True)
    for heading in ("error", "sharded", "rank", "coll", "fell", "graphs", "s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        table.add_row(*_cells(row))
    counts = ", ".join(f"{count} {verdict}" for verdict, count in result["counts"].items())
    return Lines(table, Text(_EXPLAINED, style="dim"), *map(Text, _remarks(result["rows"])), Text(counts, style="bold"))


def _cells(row: Row) -> list[RenderableType]:
    verdict = row["verdict"]
    work = row["work"]
    worst = row["worst"]
    return [
        Text(row["type"]),
        Text(verdict, style=_STYLE.get(verdict, "bold red")),
        Text(f"{worst:.1e}" if isinstance(worst, float) else str(worst or "")),
        Text(f"{work['share']:.0%}" if work else ""),
        Text(f"{work['rank'] / work['whole']:.0%}" if work and work["whole"] else ""),
        Text(str(work["collectives"]) if work else ""),
        Text(str(len(row["fallbacks"]))),
        Text(f"{row['graphs']}/{row['compilations']}"),
        Text(f"{row['seconds']:.0f}"),
    ]


def _remarks(rows: Sequence[Row]) -> list[str]:
    remarks = []
    for row in rows:
        if row["reason"]:
            first, *rest = str(row["reason"]).splitlines()
            remarks.append("\n".join([f"{row['type']}: {row['verdict']}: {first}", *rest[:8]]))
        grouped = Counter((f["op"], f["reason"], f["source"]) for f in row["fallbacks"])
        for (op, reason, source), count in grouped.items():
            module = next(f["module"] for f in row["fallbacks"] if (f["op"], f["source"]) == (op, source))
            more = f", and {count - 1} more" if count > 1 else ""
            remarks.append(f"{row['type']}: replicated: {op} in {module or 'the model'} ({source}){more}: {reason}")
        for why in row["whole_graphs"]:
            remarks.append(f"{row['type']}: a graph runs whole on every rank: {why}")
    return remarks


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
