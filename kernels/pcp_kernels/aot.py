# SPDX-License-Identifier: Apache-2.0
"""Compile a Triton kernel for a GPU that is not there, and read what the result would occupy.

Triton needs no driver to produce a cubin, and its wheel carries ``cuobjdump``, so "this kernel compiles for sm_90
and spills nothing" is a test that runs on any Linux machine. Checked with Triton 3.9.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel occupies."""

    registers: int
    """Per thread."""
    spill_bytes: int
    """Stack and local memory per thread: 0 when every value stays in a register."""
    shared_bytes: int
    """Shared memory per block."""
    ptx: str


def compile_for(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    sm: int,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Resources:
    """Compile ``kernel`` for CUDA compute capability ``sm`` (80, 90, 100).

    Args:
        kernel: a ``triton.jit`` function, decorated without ``TRITON_INTERPRET``.
        signature: argument name to type (``"*i64"``, ``"i32"``), without the constants. Pointers and i64 arguments
            (strides) are taken to be multiples of 16, as they are for PyTorch's allocations.
        constants: the ``tl.constexpr`` arguments.

    Raises:
        ModuleNotFoundError: without triton.
        RuntimeError: interpreted kernel, or a cubin that ``cuobjdump`` cannot read.
        triton.CompilationError: the kernel cannot be compiled for this target.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(
            f"{kernel!r} is interpreted, so there is nothing to compile: unset TRITON_INTERPRET before importing it."
        )
    names = list(kernel.arg_names)
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or kind == "i64"]
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    registers, stack, _, local = _usage(compiled.asm["cubin"])
    return Resources(
        registers=registers,
        spill_bytes=stack + local,
        shared_bytes=int(compiled.metadata.shared),
        ptx=compiled.asm["ptx"],
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
