# SPDX-License-Identifier: Apache-2.0
"""Compile a Triton kernel for a GPU that is not there, and read what the result would occupy.

Triton needs no driver to produce a cubin, and its wheel carries ``cuobjdump``, so "this kernel compiles for sm_90
and spills nothing" is a test that runs on any Linux machine. Checked with Triton 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pcp_kernels import catalog, store
from pcp_kernels.inspect_aot import Resources, inspect_cuda, inspect_hip
from pcp_kernels.specs import KernelSpec

__all__ = ["TARGETS", "Resources", "Target", "Unsupported", "compile_for", "compile_spec"]


@dataclass(frozen=True)
class Target:
    """An architecture to compile for."""

    name: str
    backend: str
    arch: int | str
    shared_limit: int
    """Bytes of shared memory that one block may use."""

    @property
    def capability(self) -> int:
        """Compute capability, as PyTorch reports it: key of the launch settings."""
        return self.arch if isinstance(self.arch, int) else catalog.AMD


TARGETS: Mapping[str, Target] = {
    "sm_80": Target("sm_80", "cuda", 80, 163 * 1024),
    "sm_90": Target("sm_90", "cuda", 90, 227 * 1024),
    "sm_100": Target("sm_100", "cuda", 100, 227 * 1024),
    "gfx942": Target("gfx942", "hip", "gfx942", 64 * 1024),
}


class Unsupported(RuntimeError):
    """Triton refuses to compile the kernel for this target; the message says why."""


def compile_spec(spec: KernelSpec, target: Target) -> Resources:
    """Compile the generated text of ``spec``, as it stands, for ``target``.

    Raises:
        ModuleNotFoundError: without triton.
        Unsupported: the kernel cannot be compiled for this target.
    """
    module = store.load(spec)
    meta = module.META
    try:
        compiled = _compile(
            module.kernel, meta["signature"], {}, meta["aligned"], target, num_warps=meta["num_warps"],
            num_stages=meta["num_stages"], enable_fp_fusion=meta["enable_fp_fusion"],
        )  # fmt: skip
    except Exception as error:
        # CompilationError, OutOfResources, PassManager failures: Triton has no common class for "not on this target".
        if "fp8e4nv not supported" in str(error):
            raise Unsupported("no e4m3 values") from error
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise Unsupported(f"{type(error).__name__}: {lines[-1] if lines else error!r}") from error
    return (inspect_hip if target.backend == "hip" else inspect_cuda)(compiled)


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
    aligned = [name for name, kind in signature.items() if kind == "i64"]
    options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
    return inspect_cuda(_compile(kernel, signature, constants, aligned, TARGETS[f"sm_{sm}"], **options))


def _compile(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    aligned: list[str],
    target: Target,
    **options: Any,
) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if not isinstance(kernel, triton.runtime.JITFunction):
        raise RuntimeError(
            f"{kernel!r} is interpreted, so there is nothing to compile: unset TRITON_INTERPRET before importing it."
        )
    names = list(kernel.arg_names)
    divisible = [name for name, kind in signature.items() if kind.startswith("*") or name in aligned]
    source = ASTSource(
        fn=kernel,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=dict(constants),
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    gpu = GPUTarget(target.backend, target.arch, 64 if target.backend == "hip" else 32)
    return triton.compile(source, target=gpu, options=options)
