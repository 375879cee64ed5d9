# SPDX-License-Identifier: Apache-2.0
"""Selections for the tests of the top-k kernels, and what runs them in the interpreter's process.

Queries, keys and weights are small integers and scales are powers of two, so every score is exact in every order of
summation, and ties are everywhere.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pcp_kernels import catalog, store
from pcp_kernels.generate import generate
from pcp_kernels.ops import launch, plans
from pcp_kernels.ops import topk as ops
from pcp_kernels.ops.launch import DTYPES
from pcp_kernels.reference import select as reference
from pcp_kernels.specs import KernelSpec

DIM = 32
PAGE = 16
TOPK = 16
AMPLE = 1 << 24


@dataclass(frozen=True)
class Rows:
    """Arguments of ``index_topk_rows``."""

    q: torch.Tensor
    w: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor | None
    ks: torch.Tensor
    ke: torch.Tensor
    topk: int = TOPK

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.w, self.k, self.k_scale, self.ks, self.ke, self.topk

    def reference(self) -> torch.Tensor:
        return reference.topk_rows(*self.arguments())


@dataclass(frozen=True)
class Paged:
    """Arguments of ``index_topk_paged``."""

    q: torch.Tensor
    w: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    row_request: torch.Tensor
    ke: torch.Tensor
    topk: int = TOPK
    page: int = PAGE

    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.w, self.cache, self.block_table, self.row_request, self.ke, self.topk, self.page

    def reference(self) -> torch.Tensor:
        return reference.topk_paged(*self.arguments())


Case = Rows | Paged


def integers(generator: torch.Generator, reach: int, *shape: int) -> torch.Tensor:
    """fp32 integers from ``-reach`` to ``reach``."""
    return torch.randint(-reach, reach + 1, shape, generator=generator).float()


def rows_case(
    kind: str, ks: Sequence[int], ke: Sequence[int], *, heads: int = 4, keys: int = 300, topk: int = TOPK, seed: int = 0
) -> Rows:
    """Integer-valued contiguous keys in the store ``kind``."""
    generator = torch.Generator().manual_seed(seed)
    dtype, count = DTYPES[kind], len(ke)
    scale = torch.exp2(integers(generator, 2, keys)) if kind == "fp8" else None
    return Rows(
        integers(generator, 2, count, heads, DIM).to(dtype),
        integers(generator, 3, count, heads),
        integers(generator, 2, keys, DIM).to(dtype),
        scale,
        torch.tensor(ks, dtype=torch.int32),
        torch.tensor(ke, dtype=torch.int32),
        topk,
    )


def paged_case(
    kind: str, requests: Sequence[int], ke: Sequence[int], *, heads: int = 4, topk: int = TOPK, seed: int = 0
) -> Paged:
    """Integer-valued keys in shuffled pages, in the store ``kind``; block-table entries past the end are nonsense."""
    generator = torch.Generator().manual_seed(seed)
    count, columns = 1 + max(requests), -(-max(ke) // PAGE) + 1
    pages = count * columns + 3
    table = torch.randperm(pages, generator=generator)[: count * columns].view(count, columns).to(torch.int32)
    for request in range(count):
        longest = max((n for r, n in zip(requests, ke, strict=True) if r == request), default=0)
        table[request, -(-longest // PAGE) :] = 2**30
    values = integers(generator, 2, pages, PAGE, DIM)
    if kind == "fp8":
        scales = torch.exp2(integers(generator, 2, pages, PAGE))
        bytes_of_values = values.to(torch.float8_e4m3fn).view(torch.uint8).view(pages, -1)
        cache = torch.cat([bytes_of_values, scales.view(torch.uint8).view(pages, -1)], dim=1)
    else:
        cache = values.to(DTYPES[kind])
    return Paged(
        integers(generator, 2, len(ke), heads, DIM).to(DTYPES[kind]),
        integers(generator, 3, len(ke), heads),
        cache,
        table,
        torch.tensor(requests, dtype=torch.int32),
        torch.tensor(ke, dtype=torch.int32),
        topk,
    )


def run(case: Case, kind: plans.Kind | None = None, workspace_bytes: int = AMPLE, **plan: Any) -> torch.Tensor:
    """The kernels' selection, in the interpreter; ``plan`` replaces fields of the plan that is chosen."""
    select: Callable[..., torch.Tensor] = ops.select_rows if isinstance(case, Rows) else ops.select_paged
    chosen = plans.choose

    def changed(*args: Any, **kwargs: Any) -> plans.Plan:
        found = chosen(*args, **kwargs)
        return replace(found, **plan)

    plans.choose = changed  # type: ignore[assignment]
    try:
        return select(*case.arguments(), workspace_bytes, kind=kind)
    finally:
        plans.choose = chosen


def run_ranges(case: Case, ranges: int) -> torch.Tensor:
    """The split plan with this number of ranges."""
    spec = catalog.split(heads=case.q.shape[1], dim=DIM, topk=case.topk, arch=catalog.INTERPRETER, store="fp32")
    tiles = -(-len(case.ke) // spec.block_queries)
    return run(
        case,
        "split",
        ranges=ranges,
        held_words=max(tiles * ranges * spec.block_queries * spec.capacity, 4096),
        part_words=len(case.ke) * ranges * case.topk,
    )


class _Allocations(TorchDispatchMode):
    """Adds up what is allocated, whether or not it is freed again."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and func.overloadpacket is torch.ops.aten.empty:
            self.total += result.nbytes
        return result


def run_counted(case: Case, kind: plans.Kind | None, workspace_bytes: int) -> tuple[torch.Tensor, int]:
    """The selection, and the bytes that it allocated uninitialised: workspace and output."""
    counted = _Allocations()  # type: ignore[no-untyped-call]
    with counted:
        found = run(case, kind, workspace_bytes)
    return found, counted.total


def run_op(case: Case, workspace_bytes: int = AMPLE) -> torch.Tensor:
    """Through the operator, which in the interpreter's process takes the interpreter."""
    operator = ops.index_topk_rows if isinstance(case, Rows) else ops.index_topk_paged
    result: torch.Tensor = operator(*case.arguments(), workspace_bytes)
    return result


def run_slices(wide: torch.Tensor, half: torch.Tensor, case: Rows) -> torch.Tensor:
    """With the queries and weights as slices of two products (packing for this process would make them dense)."""
    width = case.q.shape[1] * DIM
    queries = wide[:, :width].unflatten(1, (case.q.shape[1], DIM))
    return run_op(replace(case, q=queries, w=half[:, width:]))


def run_selector(scores: torch.Tensor, valid: torch.Tensor, topk: int) -> torch.Tensor:
    """The selector alone over rows of scores."""
    spec = catalog.select(topk, catalog.INTERPRETER)
    out = torch.full((len(valid), topk), -7, dtype=torch.int32)
    held = torch.empty((2, spec.capacity), dtype=torch.int32)
    arguments = {
        "score_ptr": scores, "valid_ptr": valid, "out_ptr": out, "held_key_ptr": held[0], "held_id_ptr": held[1],
        "rows": len(valid), "score_stride": scores.stride(0), "out_stride": topk,
    }  # fmt: skip
    launch.launch(spec, (1,), scores, arguments)
    return out


def run_far_pages() -> tuple[torch.Tensor, torch.Tensor]:
    """Pages so far apart that their offsets pass 2**31 bytes; what lies between is never touched."""
    near = paged_case("fp8", [0, 0], [40, 60])
    stride = 1_300_000_000
    rows, width = 3, near.cache.shape[1]
    far = torch.empty(stride * 2 + width, dtype=torch.uint8).as_strided((rows, width), (stride, 1))
    table = torch.tensor([[2, 0, 1, 2**30]], dtype=torch.int32)
    for place, page in enumerate(near.block_table[0, :3].tolist()):
        far[int(table[0, place])] = near.cache[page]
    short = torch.tensor([40, 48], dtype=torch.int32)
    case = replace(near, cache=far, block_table=table, ke=short)
    return run(case, "fused"), replace(near, ke=short).reference()


def run_mutant(family: str, edits: Sequence[tuple[str, str]], case: Case, kind: plans.Kind) -> torch.Tensor:
    """The selection with the texts of ``family`` edited; every edit must find its place."""
    with _edited(family, edits):
        return run(case, kind)


def run_mutant_selector(
    edits: Sequence[tuple[str, str]], scores: torch.Tensor, valid: torch.Tensor, topk: int
) -> torch.Tensor:
    """The selector alone with its text edited."""
    with _edited("select", edits):
        return run_selector(scores, valid, topk)


@contextmanager
def _edited(family: str, edits: Sequence[tuple[str, str]]) -> Iterator[None]:
    load = store.load

    def load_edited(spec: KernelSpec, *, interpret: bool = False) -> ModuleType:
        if spec.family != family:
            return load(spec, interpret=interpret)
        text = generate(spec, interpret)
        for old, new in edits:
            assert old in text, f"the text of {spec.name} has no {old!r}"
            text = text.replace(old, new)
        return _import(text)

    store.load = load_edited
    try:
        yield
    finally:
        store.load = load


def _import(text: str) -> ModuleType:
    """Triton reads the source of a kernel from a file."""
    path = Path(tempfile.mkdtemp()) / "edited.py"
    path.write_text(text)
    found = importlib.util.spec_from_file_location(f"edited_{path.parent.name}", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[module.__name__] = module
    found.loader.exec_module(module)
    return module
