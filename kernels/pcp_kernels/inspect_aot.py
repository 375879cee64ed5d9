# SPDX-License-Identifier: Apache-2.0
"""What a compiled kernel occupies and which instructions it uses, read from its assembly and its cubin."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")

MATRIX_FAMILIES = ("wgmma", "tcgen05", "mma.sync", "mfma")
_MATRIX = {
    "wgmma": re.compile(r"\bwgmma\.mma_async"),
    "tcgen05": re.compile(r"\btcgen05\.mma"),
    "mma.sync": re.compile(r"\bmma\.sync"),
    "mfma": re.compile(r"\bv_mfma_"),
}
# cp.async.wait_* and cp.async.commit_group move nothing. On AMD a load that goes to LDS ends in " lds".
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared|\bcp\.async\.bulk\.[a-z0-9.:_]*shared|\bbuffer_load_\w+ .* lds$", re.M)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel occupies."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Stack and local memory per thread: 0 when every value stays in a register."""
    shared_bytes: int
    """Shared memory per block."""
    matrix_instructions: str
    """One of :data:`MATRIX_FAMILIES`, or ``"none"``."""
    async_copies: int
    """Copies to shared memory that the program does not wait for, as written in the assembly."""
    ptx: str
    """The assembly; on AMD it is not PTX."""


def matrix_family(assembly: str) -> str:
    """The matrix instructions in ``assembly``; of several families the first of :data:`MATRIX_FAMILIES`."""
    return next((family for family in MATRIX_FAMILIES if _MATRIX[family].search(assembly)), "none")


def async_copies(assembly: str) -> int:
    """How many asynchronous copies to shared memory ``assembly`` holds."""
    return len(_ASYNC.findall(assembly))


def inspect_cuda(compiled: Any) -> Resources:
    """Of a kernel that Triton compiled for CUDA.

    Raises:
        RuntimeError: the bundled ``cuobjdump`` cannot read the cubin.
    """
    registers, stack, _, local = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    return Resources(
        registers=registers,
        spill_bytes=stack + local,
        shared_bytes=int(compiled.metadata.shared),
        matrix_instructions=matrix_family(ptx),
        async_copies=async_copies(ptx),
        ptx=ptx,
    )


def inspect_hip(compiled: Any) -> Resources:
    """Of a kernel that Triton compiled for AMD.

    Raises:
        RuntimeError: the assembly lacks its resource notes.
    """
    text = compiled.asm["amdgcn"]
    found = {name: re.search(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "private_segment_fixed_size")}
    missing = [name for name, match in found.items() if match is None]
    if missing:
        raise RuntimeError(f"the assembly for AMD does not say {', '.join(missing)}; look at Triton's output format")
    registers, private = (int(match.group(1)) for match in found.values() if match is not None)
    return Resources(
        registers=registers,
        spill_bytes=private,
        shared_bytes=int(compiled.metadata.shared),
        matrix_instructions=matrix_family(text),
        async_copies=async_copies(text),
        ptx=text,
    )


def _usage(cubin: bytes) -> tuple[int, int, int, int]:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        run = subprocess.run(
            [os.fspath(tool), "-res-usage", os.fspath(path)], capture_output=True, text=True, timeout=60, check=False
        )
    found = _USAGE.search(run.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resource usage (exit {run.returncode}): {run.stdout} {run.stderr}")
    registers, stack, shared, local = map(int, found.groups())
    return registers, stack, shared, local
