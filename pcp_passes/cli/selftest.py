# SPDX-License-Identifier: Apache-2.0
"""The self-test of ``pcp doctor``: two real processes over gloo lay out a batch, gather it and restore it.

``python -m pcp_passes.cli.selftest RANK FOLDER`` is one rank; :func:`run` starts both. No vLLM is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pcp_passes.distributed.store import Store

WORLD = 2
_AXIS = "pcp-doctor"


def run(*, timeout_s: float = 60.0, program: Sequence[str] = ("-m", "pcp_passes.cli.selftest")) -> dict[str, Any]:
    """Start both ranks and wait for them; never longer than ``timeout_s`` seconds.

    Args:
        program: arguments of Python before RANK and FOLDER.

    Returns:
        ``passed`` (names of the checks that hold on both ranks), ``failures`` (sentences) and ``seconds``.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pcp-doctor-") as name:
        folder = Path(name)
        ranks = [_start(rank, folder, program) for rank in range(WORLD)]
        try:
            failures = list(_wait(ranks, folder, begin + timeout_s, timeout_s))
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        reports = [_report(folder, rank) for rank in range(WORLD)]
    for rank, report in enumerate(reports):
        failures += [f"rank {rank}: {check}: {why}" for check, why in report.items() if why]
    passed = [check for check, why in reports[0].items() if not why and reports[1].get(check) == ""]
    return {"passed": passed, "failures": failures, "seconds": round(time.monotonic() - begin, 1)}


def _start(rank: int, folder: Path, program: Sequence[str]) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    with (folder / f"log.{rank}").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *program, str(rank), str(folder)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def _wait(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline: float, timeout_s: float) -> Iterator[str]:
    """One sentence for each rank that ended badly, or one for all that did not end."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in ranks]
        bad = [rank for rank, code in enumerate(codes) if code]
        for rank in bad:
            log = (folder / f"log.{rank}").read_text(errors="replace").strip()
            last = log.splitlines()[-1] if log else "it printed nothing"
            yield f"rank {rank} ended with exit status {codes[rank]}: {last}"
        if bad or None not in codes:
            return
        time.sleep(0.05)
    late = [str(rank) for rank, process in enumerate(ranks) if process.poll() is None]
    yield f"rank {' and '.join(late)} did not finish within {timeout_s:g} s and was ended"


def _report(folder: Path, rank: int) -> dict[str, str]:
    path = folder / f"report.{rank}"
    return json.loads(path.read_text()) if path.exists() else {}


# One rank.


def main(arguments: Sequence[str]) -> None:
    """Run every check; write ``{check: why it failed, or ""}``."""
    import torch.distributed

    from pcp_passes.collectives import bound_axis

    dist: Any = torch.distributed  # stores and groups are exported only where it was built in
    rank, folder = int(arguments[0]), Path(arguments[1])
    bootstrap = dist.FileStore(str(folder / "rendezvous"), WORLD)
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", bootstrap), rank=rank, world_size=WORLD)
    report = {}
    with bound_axis(_AXIS, dist.group.WORLD):
        for kind in ("zigzag", "contiguous"):
            for decode in ("replicate", "owner"):
                report[f"round trip, {kind}, {decode}"] = _why(partial(_round_trip, rank, kind, decode))
    report["disagreement is seen"] = _why(partial(_agreement, rank, dist.PrefixStore("pcp", bootstrap)))
    dist.destroy_process_group()
    unfinished = folder / f".report.{rank}"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(folder / f"report.{rank}")


def _why(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _round_trip(rank: int, kind: str, decode: str) -> str:
    import numpy as np
    import torch

    from pcp_passes.collectives import all_gather_rows
    from pcp_passes.layout import Batch, build_layout
    from pcp_passes.plan import PAD_SLOT_ID, StepPlan

    # Two prefills, the last token of a chunked one, a chunk on a context, two decodes: an odd number, so some pads.
    lengths, contexts, prompts = [38, 61, 1, 5, 1, 1], [0, 0, 12, 7, 30, 99], [38, 61, 13, 20, 25, 99]
    as_array = partial(np.array, dtype=np.int32)
    batch = Batch(as_array(lengths), as_array(contexts), as_array(prompts))
    layout = build_layout(batch, WORLD, kind=kind, decode=decode)
    plan = StepPlan(WORLD, rank, max_tokens=layout.padded_tokens + 3, max_rows=layout.max_rows, device="cpu")
    plan.load(layout)
    count = layout.num_tokens
    rows = torch.randn(count, 24, generator=torch.Generator().manual_seed(count))
    ids = torch.arange(1000, 1000 + count)
    local_ids = plan.shard_tokens(ids, torch.arange(count)).input_ids
    if not torch.equal(local_ids.long(), plan.shard_rows(ids)):
        return "the tokens of this rank are not those of its rows"
    gathered = all_gather_rows(plan.shard_rows(rows), WORLD, _AXIS)
    restored = plan.restore_rows(gathered)
    if not torch.equal(restored.view(torch.int32), rows.view(torch.int32)):
        wrong = int((restored.view(torch.int32) != rows.view(torch.int32)).any(1).sum())
        return f"{wrong} of {count} restored rows differ from the rows before sharding"
    slots = plan.expand_slots(torch.arange(count)[None])[0]
    written = slots != PAD_SLOT_ID
    if slots[written].sort().values.tolist() != list(range(count)):
        return "the gathered rows do not write every cache slot exactly once"
    if not torch.equal(gathered[written], rows[slots[written]]):
        return "gathered rows are written to the cache slots of other tokens"
    return ""


def _agreement(rank: int, bootstrap: Store) -> str:
    from pcp_passes.distributed import open_store, require_agreement
    from pcp_passes.errors import RankMismatch

    store = open_store("127.0.0.1", rank=rank, world=WORLD, bootstrap=bootstrap, name="doctor", timeout_s=20.0)
    require_agreement(store, rank=rank, world=WORLD, topic="equal", facts={"graph": "same"}, timeout_s=20.0)
    try:
        require_agreement(store, rank=rank, world=WORLD, topic="other", facts={"graph": f"of {rank}"}, timeout_s=20.0)
    except RankMismatch as found:
        return "" if "graph" in str(found) else f"the difference is not named: {found}"
    return "two ranks with different graphs agreed"


if __name__ == "__main__":
    main(sys.argv[1:])
