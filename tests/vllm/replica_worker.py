# SPDX-License-Identifier: Apache-2.0
"""What a test asks of the workers of a server (``--worker-extension-cls``): what their steps ran, which row counts
their expert layers exchanged, where the host read a tensor, and faults. Answers are files, one per worker, because the
server passes on those of one replica only."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from pcp_passes.frontends.vllm import cpu_experts
from pcp_passes.frontends.vllm import runtime as runtimes
from pcp_passes.piecewise.sync_check import SyncCheck

PLANTED = "/site-packages/pcp_passes/planted.py"
_STATE = "_pcp_replica_watch"


class Watch:
    """Counts what happens between :meth:`ReplicaWorker.watch` and :meth:`ReplicaWorker.report`."""

    def __init__(self, worker: Any, check_reads: bool, planted: bool) -> None:
        self.stack = ExitStack()
        self.reads: Counter[str] = Counter()
        self.forwards: list[Any] = []
        self.sizes: list[list[int]] = []
        self.dummies = 0
        runner, current = worker.model_runner, runtimes.current()
        assert current is not None
        current.ran = self.forwards
        self.stack.callback(setattr, current, "ran", None)
        for name in ("execute_model", "sample_tokens") if check_reads else ():
            self._around(runner, name, functools.partial(SyncCheck, self.reads))
        self._around(runner, "_dummy_run", self._count_dummy)
        self._note_sizes()
        if planted:
            self._plant_read(runner.pcp_manager)

    def _plant_read(self, manager: Any) -> None:
        """The fault: this package reads a value of every step's hidden states on the host."""
        scope: dict[str, Any] = {}
        exec(compile("def read(rows):\n    return rows.sum().item()\n", PLANTED, "exec"), scope)
        restore = manager.restore_for_sampling

        def reading(hidden_states: torch.Tensor, *args: Any) -> Any:
            scope["read"](hidden_states)
            return restore(hidden_states, *args)

        manager.restore_for_sampling = reading
        self.stack.callback(delattr, manager, "restore_for_sampling")

    def _around(self, owner: Any, name: str, context: Callable[[], Any]) -> None:
        method = getattr(owner, name)

        def inside(*args: Any, **kwargs: Any) -> Any:
            with context():
                return method(*args, **kwargs)

        setattr(owner, name, inside)
        self.stack.callback(delattr, owner, name)

    @contextmanager
    def _count_dummy(self) -> Iterator[None]:
        self.dummies += 1
        yield

    def _note_sizes(self) -> None:
        gather = cpu_experts.gather_rows

        def noting(rows: torch.Tensor, sizes: Any, group: Any) -> torch.Tensor:
            self.sizes.append(list(sizes))
            assert rows.shape[0] == sizes[torch.distributed.get_rank(group)]
            return gather(rows, sizes, group)

        cpu_experts.gather_rows = noting
        self.stack.callback(setattr, cpu_experts, "gather_rows", gather)


class ReplicaWorker:
    """Mixed into vLLM's worker; every method runs on all workers of all replicas."""

    def watch(self, check_reads: bool = False, planted: bool = False) -> None:
        """Begin to count; ``check_reads``: also where the host reads; ``planted``: with a read of ours among them."""
        setattr(self, _STATE, Watch(self, check_reads, planted))

    def report(self, folder: str) -> None:
        """End counting and write ``<folder>/rank<world rank>.json``."""
        watch: Watch = getattr(self, _STATE)
        watch.stack.close()
        found = {
            "reads": by_package(watch.reads),
            "ran": Counter("/".join(pair) for pair in watch.forwards),
            "sizes": [sizes for i, sizes in enumerate(watch.sizes) if i % 3 == 0],  # hidden states, weights, experts
            "dummies": watch.dummies,
        }
        path = Path(folder) / f"rank{_world_rank(self)}.json"
        path.with_suffix(".part").write_text(json.dumps(found))
        path.with_suffix(".part").rename(path)

    def keep_own_part(self) -> None:
        """The fault: the combine takes this rank's experts' part of the sum only."""

        def own_part(rows: torch.Tensor, sizes: Any, rank: int, group: Any) -> torch.Tensor:
            return rows[sum(sizes[:rank]) :][: sizes[rank]].clone()

        _replaced.setdefault("reduce_rows", cpu_experts.reduce_rows)
        cpu_experts.reduce_rows = own_part

    def undo(self) -> None:
        """Back to the real code."""
        for name, function in _replaced.items():
            setattr(cpu_experts, name, function)
        _replaced.clear()


def _world_rank(worker: Any) -> int:
    """The rank over all replicas, also of those whose process groups span one replica only."""
    parallel = worker.vllm_config.parallel_config
    ranks = parallel.world_size
    return int(parallel.data_parallel_index) * ranks + torch.distributed.get_rank() % ranks


_replaced: dict[str, Any] = {}


def by_package(reads: Counter[str]) -> Counter[str]:
    """Where the host read, with paths from the package on."""
    short: Counter[str] = Counter()
    for where, count in reads.items():
        ours = next((package for package in ("pcp_passes", "pcp_kernels") if f"/{package}/" in where), None)
        tail = where.rpartition(f"/{ours}/")[2] if ours else where.rpartition("/site-packages/")[2]
        short[f"{ours}/{tail}" if ours else tail] += count
    return short
