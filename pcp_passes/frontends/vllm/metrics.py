# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of prefill context parallelism: rows, padding, bytes, and what the drafter's tokens were worth.

Workers count, and another process answers ``/metrics``. In between lies one small memory-mapped array of int64 per
rank: a worker writes its totals there after each step, and a scrape reads what is there. No message, lock or timer is
involved, so the serving path pays a few stores a step. Counting begins after vLLM's warm-up.

Accepted counts are read where vLLM has them on the host anyway, when an output is handed to the scheduler; nothing is
copied from the device for them. Ranks of other machines are not seen by the front end, so on several nodes its metrics
cover the ranks of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pcp_passes.collectives import Collective, CollectiveLog, record_collectives
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.speculative.acceptance import AcceptanceCounters

#: Where the ranks of this engine keep their arrays. Set by the front end, inherited by its workers.
FOLDER = "PCP_PASSES_METRICS"

#: The totals of one rank; after them come drafted and accepted tokens, one entry each per draft position.
#: ``busiest_rows`` adds, step by step, the rows of the rank that has most of them.
FIELDS = (
    "sharded_steps",
    "replicated_steps",
    "rows",
    "padding_rows",
    "busiest_rows",
    "collectives",
    "bytes",
    "rounds",
)
_AT = {name: index for index, name in enumerate(FIELDS)}
_serial = itertools.count()
_writer: RankTotals | None = None
_until_the_process_ends = contextlib.ExitStack()


class RankTotals(CollectiveLog):
    """The totals of this rank, kept in ``path`` (created, or begun again at zero).

    Args:
        rank: this rank in the PCP group.
        acceptance: counts drafts; only the rank whose tokens are used records any.
    """

    def __init__(self, path: Path, rank: int, acceptance: AcceptanceCounters) -> None:
        super().__init__()
        self.rank, self.acceptance = rank, acceptance
        path.parent.mkdir(parents=True, exist_ok=True)
        size = len(FIELDS) + 2 * acceptance.steps
        create: Callable[..., npt.NDArray[np.int64]] = np.lib.format.open_memmap
        self.values = create(path, "w+", dtype=np.int64, shape=(size,))

    def step(self, planned: dict[str, Any]) -> None:
        """Count a step from the batch manager's description of it."""
        rows = planned["rows_per_rank"]
        mine, padded = rows[self.rank], max(planned["padded_rows"], *rows)
        self._count(f"{planned['variant']}_steps", 1)
        self._count("rows", mine)
        self._count("padding_rows", padded - mine)
        self._count("busiest_rows", max(rows))

    def add(self, entry: Collective) -> None:
        """Count a collective; its description is not kept."""
        self._count("collectives", 1)
        self._count("bytes", entry.bytes)

    def verified(self, drafted: npt.NDArray[Any], sampled: npt.NDArray[Any]) -> None:
        """Count one step's drafts.

        Args:
            drafted: int[R], drafts that the step verified.
            sampled: int[R], tokens that came out of it, one more than the accepted drafts; 0 while prefilling.
        """
        accepted = np.where(drafted > 0, sampled - 1, 0)
        counters = self.acceptance
        counters.record(drafted.tolist(), accepted.tolist())
        self.values[_AT["rounds"]] = counters.rounds
        self.values[len(FIELDS) :] = [*counters.drafted, *counters.accepted]

    def _count(self, name: str, amount: int) -> None:
        self.values[_AT[name]] += amount


# -- in a worker -------------------------------------------------------------------------------------------


def count_after_warm_up(worker: Any) -> None:
    """Begin to count when ``worker`` has warmed up: its dummy steps are nobody's."""
    warm_up = worker.compile_or_warm_up_model

    @functools.wraps(warm_up)
    def then_count(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        begin(worker)
        return result

    worker.compile_or_warm_up_model = then_count


def begin(worker: Any) -> None:
    """Count from now on. One tensor-parallel rank of a PCP rank does it; the others would say the same."""
    global _writer
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    runtime, folder = runtimes.current(), os.environ.get(FOLDER)
    if runtime is None or folder is None or get_tensor_model_parallel_rank() != 0:
        return
    speculative = worker.vllm_config.speculative_config
    steps = 0 if speculative is None else int(speculative.num_speculative_tokens)
    acceptance = AcceptanceCounters(steps, floor=runtime.options.acceptance_floor)
    stages = get_pp_group()
    # Of all replicas, also of those that know nothing of each other: they share the folder.
    stage = worker.vllm_config.parallel_config.data_parallel_index * stages.world_size + stages.rank_in_group
    number = stage * runtime.pcp + runtime.rank
    _writer = RankTotals(Path(folder) / f"rank-{number}.npy", runtime.rank, acceptance)
    runtime.observers.append(_writer.step)
    _until_the_process_ends.enter_context(record_collectives(_writer))


def around_sample_tokens(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Note, on the output, how many drafts each of its requests had verified. The host knows."""
    state = runner.execute_model_state
    output = original(runner, *args, **kwargs)
    if _writer is None or _writer.rank != 0 or state is None or not hasattr(output, "num_sampled_tokens_np"):
        return output
    batch = state.input_batch if runner.pcp_manager is None else runner.pcp_manager.global_batch
    output.pcp_passes_drafted = batch.num_draft_tokens_per_req
    return output


def around_get_output(original: Callable[..., Any], output: Any) -> Any:
    """vLLM has just waited for the sampled counts; count them too."""
    result = original(output)
    drafted = getattr(output, "pcp_passes_drafted", None)
    if _writer is not None and drafted is not None:
        del output.pcp_passes_drafted  # an output may be asked for twice
        _writer.verified(drafted, output.num_sampled_tokens_np)
    return result


# -- in the front end --------------------------------------------------------------------------------------


def publish() -> None:
    """Choose a folder for the engine that is about to start, and answer scrapes from it."""
    from prometheus_client import REGISTRY

    folder = Path(tempfile.gettempdir()) / f"pcp-passes-metrics-{os.getpid()}-{next(_serial)}"
    os.environ[FOLDER] = str(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    attach(REGISTRY)


def around_registry(original: Callable[..., Any]) -> Callable[..., Any]:
    """With several API servers vLLM answers from a registry made for the occasion; ours belongs in it too."""

    @functools.wraps(original)
    def registry() -> Any:
        return attach(original())

    return registry


def attach(registry: Any) -> Any:
    """Register the collector with ``registry``, once; return ``registry``."""
    if FOLDER in os.environ and not hasattr(registry, "_pcp_passes_collector"):
        registry._pcp_passes_collector = Collector()
        registry.register(registry._pcp_passes_collector)
    return registry


class Collector:
    """What prometheus_client asks at each scrape."""

    def describe(self) -> list[Any]:
        """Nothing is known before the workers count; prometheus_client would call ``collect`` to find names."""
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics of the engine started last."""
        folder = os.environ.get(FOLDER)
        ranks = {} if folder is None else read(Path(folder))
        if ranks:
            yield from _families(ranks)


def read(folder: Path) -> dict[int, list[int]]:
    """Totals per rank, as :data:`FIELDS` and the draft positions order them. Ranks are numbered in the order (dp, pp,
    pcp), which without replicas and stages is the PCP rank."""
    found = {}
    for path in sorted(folder.glob("rank-*.npy")):
        try:
            found[int(path.stem.removeprefix("rank-"))] = np.load(path, mmap_mode="r").tolist()
        except (OSError, ValueError):  # being created: its header is not whole yet
            continue
    return found


def _families(ranks: dict[int, list[int]]) -> Iterator[Any]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    def counter(name: str, text: str, label: str, values: Mapping[int, float]) -> Any:
        family = CounterMetricFamily(f"vllm:pcp_{name}", text, labels=[label])
        for key, value in values.items():
            family.add_metric([str(key)], value)
        return family

    def gauge(name: str, text: str, value: float) -> Any:
        return GaugeMetricFamily(f"vllm:pcp_{name}", text, value=value)

    def total(name: str) -> dict[int, int]:
        return {rank: values[_AT[name]] for rank, values in ranks.items()}

    rows, sent = total("rows"), total("bytes")
    steps = {body: total(f"{body}_steps") for body in ("sharded", "replicated")}
    for body, ran in steps.items():
        yield counter(f"{body}_steps", f"Steps whose target ran its {body} body.", "rank", ran)
    yield counter("rows", "Token rows of requests that a rank ran.", "rank", rows)
    yield counter("padding_rows", "Rows added so that every rank has the same count.", "rank", total("padding_rows"))
    yield counter("collectives", "Collectives that a rank took part in.", "rank", total("collectives"))
    yield counter("bytes", "Bytes that a rank contributed to collectives.", "rank", sent)
    per_step = GaugeMetricFamily("vllm:pcp_bytes_per_step", "Bytes that a rank contributed, per step.", labels=["rank"])
    for rank, amount in sent.items():
        per_step.add_metric([str(rank)], amount / max(1, sum(ran[rank] for ran in steps.values())))
    yield per_step
    if any(rows.values()):
        # Every rank of a group counts the rows of its busiest one.
        imbalance = sum(total("busiest_rows").values()) / sum(rows.values())
        text = "Rows of the busiest rank over the mean of its PCP group, 1 when even."
        yield gauge("row_imbalance", text, imbalance)
    # Of each replica one rank counts drafts, the others none.
    counts = [sum(column) for column in zip(*(values[len(FIELDS) :] for values in ranks.values()), strict=True)]
    drafted, accepted, rounds = counts[: len(counts) // 2], counts[len(counts) // 2 :], sum(total("rounds").values())
    if not counts:
        return
    yield counter("draft_tokens", "Drafts verified.", "position", dict(enumerate(drafted)))
    yield counter("accepted_tokens", "Drafts accepted.", "position", dict(enumerate(accepted)))
    if rounds:
        length = 1 + sum(accepted) / rounds
        yield gauge("acceptance_length", "Tokens per verification, the bonus token included.", length)
