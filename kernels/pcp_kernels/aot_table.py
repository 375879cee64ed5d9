# SPDX-License-Identifier: Apache-2.0
"""The table of what every shipped kernel occupies on every target, how it is measured, and when it got worse."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from pcp_kernels import catalog
from pcp_kernels.aot import TARGETS, Unsupported, compile_spec
from pcp_kernels.specs import KernelSpec, from_json
from pcp_kernels.store import triton_version

logger = logging.getLogger(__name__)

REGISTER_SLACK = 24
"""Registers per thread that another version of Triton may use more before the table counts as worse."""
MAX_REGISTERS = 255


@dataclass(frozen=True)
class Row:
    """One kernel on one target."""

    spec: str
    family: str
    target: str
    k_loop: bool = False
    registers: int = 0
    spills: int = 0
    shared_bytes: int = 0
    matrix_instructions: str = "none"
    async_copies: int = 0
    unsupported: str = ""
    """Why this target has no such kernel; the numbers are 0 then."""

    @property
    def key(self) -> tuple[str, str]:
        """Spec and target."""
        return self.spec, self.target


def measure(
    specs: Iterable[KernelSpec],
    targets: Sequence[str] = tuple(TARGETS),
    *,
    jobs: int = 2,
    progress: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Compile every spec for every target, with the target's launch settings; in order of specs, then targets.

    Args:
        specs: what to compile, such as ``catalog.shipped().values()``.
        targets: keys of :data:`pcp_kernels.aot.TARGETS`.
        jobs: compilers at a time. Each is a process of its own, since ``TRITON_INTERPRET`` must not be set in it.
        progress: called with each row when it is there.

    Raises:
        ModuleNotFoundError: without triton.
        ValueError: an unknown target.
    """
    unknown = [name for name in targets if name not in TARGETS]
    if unknown:
        raise ValueError(f"unknown target {', '.join(unknown)}; supported: {', '.join(TARGETS)}")
    return measure_pairs(((spec, name) for spec in specs for name in targets), jobs=jobs, progress=progress)


def measure_pairs(
    pairs: Iterable[tuple[KernelSpec, str]], *, jobs: int = 2, progress: Callable[[Row], None] = lambda row: None
) -> list[Row]:
    """As :func:`measure`, for chosen pairs of spec and target."""
    work = [(spec.to_json(), name) for spec, name in pairs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_as_compiler) as pool:
        futures = [pool.submit(_measure, *arguments) for arguments in work]
        try:
            for future in as_completed(futures):
                progress(future.result())
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [future.result() for future in futures]


def _as_compiler() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _measure(data: Mapping[str, Any], target: str) -> Row:
    to = TARGETS[target]
    spec = catalog.for_arch(from_json(data), to.capability)
    row = Row(spec=spec.name, family=spec.family, target=target, k_loop=spec.k_loop)
    try:
        found = compile_spec(spec, to)
    except Unsupported as error:
        return replace(row, unsupported=str(error)[:200])
    return replace(
        row,
        registers=found.registers,
        spills=found.spill_bytes,
        shared_bytes=found.shared_bytes,
        matrix_instructions=found.matrix_instructions,
        async_copies=found.async_copies,
    )


def table_json(rows: Iterable[Row], triton: str | None = None) -> dict[str, Any]:
    """Plain data: the version of Triton that compiled, and the rows."""
    return {"triton": triton or triton_version(), "rows": [asdict(row) for row in rows]}


def rows_of(data: Mapping[str, Any]) -> list[Row]:
    """The rows of a :func:`table_json`."""
    known = {field.name for field in fields(Row)}
    return [Row(**{key: value for key, value in row.items() if key in known}) for row in data["rows"]]


def violations(row: Row) -> list[str]:
    """What no kernel may do, whatever was recorded; one sentence each."""
    if row.unsupported:
        return []
    at, target, found = f"{row.spec} on {row.target}", TARGETS[row.target], []
    if row.spills:
        found.append(f"{at}: spills {row.spills} bytes per thread; required: 0")
    if row.registers > MAX_REGISTERS and target.backend == "cuda":
        found.append(f"{at}: {row.registers} registers per thread; required: at most {MAX_REGISTERS}")
    if row.shared_bytes > target.shared_limit:
        found.append(f"{at}: {row.shared_bytes} bytes of shared memory; required: at most {target.shared_limit}")
    if row.k_loop and row.matrix_instructions == "none":
        found.append(f"{at}: scans keys without matrix instructions")
    # Triton's pipeline for gfx942 prefetches through registers, so only CUDA targets can be held to this.
    if row.k_loop and not row.async_copies and target.backend == "cuda":
        found.append(f"{at}: scans keys without asynchronous copies; is there a barrier or a branch in its inner loop?")
    return found


def worse(recorded: Mapping[str, Any], measured: Iterable[Row], triton: str | None = None) -> list[str]:
    """In which ways ``measured`` breaks a rule or is worse than the ``recorded`` table.

    With the Triton that made the record every number counts; with another, registers have :data:`REGISTER_SLACK`,
    and shared memory and copies are held to :func:`violations` alone.
    """
    before = {row.key: row for row in rows_of(recorded)}
    same = recorded["triton"] == (triton or triton_version())
    found: list[str] = []
    for row in measured:
        at = f"{row.spec} on {row.target}"
        found += violations(row)
        old = before.get(row.key)
        if old is None:
            found.append(f"{at}: not in the table; `pcp kernels --write docs/kernels.md` records it")
            continue
        if row.unsupported:
            if not old.unsupported:
                found.append(f"{at}: compiled before, now {row.unsupported}")
            continue
        if old.unsupported:
            continue
        if row.registers > old.registers + (0 if same else REGISTER_SLACK):
            found.append(f"{at}: {row.registers} registers, {old.registers} recorded")
        if row.matrix_instructions != old.matrix_instructions and old.matrix_instructions != "none":
            found.append(f"{at}: {row.matrix_instructions}, {old.matrix_instructions} recorded")
        if same and row.shared_bytes > old.shared_bytes:
            found.append(f"{at}: {row.shared_bytes} bytes of shared memory, {old.shared_bytes} recorded")
        if same and row.async_copies < old.async_copies:
            found.append(f"{at}: {row.async_copies} asynchronous copies, {old.async_copies} recorded")
    return found
