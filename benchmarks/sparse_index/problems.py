# SPDX-License-Identifier: Apache-2.0
"""Queries and keys to select from, and checked calls of the kernels that select.

Scores are compared with the reference's, which sums in fp64. Selections are compared with what those scores select, but
for keys that score as the last one does within the rounding of a sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from pcp_kernels import catalog
from pcp_kernels.generate.logits import SPAN
from pcp_kernels.ops import launch as launching
from pcp_kernels.ops import topk as selecting
from pcp_kernels.reference import cache as cache_reference
from pcp_kernels.reference import pack as pack_reference
from pcp_kernels.reference import prep as prep_reference
from pcp_kernels.reference import score as score_reference
from pcp_kernels.reference import select as select_reference
from sparse_index.cases import BUILDERS, Case, Inputs, Outputs, cpu, equal
from tests.comparator import compare_selected, sum_band

WORKSPACE = 512 << 20
FP8_ACCUMULATOR = 2.0**8
"""Of the band of an fp32 sum: FP8 matrix instructions of sm_90 are reported to keep about 14 bits of a sum, not 22."""


@dataclass(frozen=True)
class Problem:
    """Rows of queries over the keys of several requests, in one of the two layouts.

    ``ke`` i32 ``[T]`` counts the keys that each row sees of its request, 0 on a row of padding.
    """

    q: torch.Tensor
    w: torch.Tensor
    keys: torch.Tensor
    """``[requests, keys, D]`` of the store."""
    scale: torch.Tensor | None
    """fp32 ``[requests, keys]``."""
    request: torch.Tensor
    ke: torch.Tensor
    page: int
    layout: str
    store: str

    @functools.cached_property
    def paged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache and block table, the pages of all requests shuffled."""
        requests, count, dim = self.keys.shape
        columns = -(-count // self.page)
        pages = torch.randperm(requests * columns, generator=torch.Generator().manual_seed(1))
        table = pages.view(requests, columns).int().to(self.keys.device)
        inside = torch.arange(count, device=table.device)
        slots = table[:, inside // self.page].long() * self.page + inside % self.page
        flat = self.keys.flatten(0, 1)
        if self.scale is None:
            cache = flat.new_zeros(len(pages), self.page, dim)
            record = flat
        else:
            cache = torch.zeros(len(pages), self.page * (dim + 4), dtype=torch.uint8, device=table.device)
            record = torch.cat(
                [flat.view(torch.uint8), self.scale.flatten()[:, None].contiguous().view(torch.uint8)], 1
            )
        cache_reference.scatter(cache, record, slots.flatten())
        return cache, table

    def select(self, topk: int, kind: Any, workspace: int = WORKSPACE) -> torch.Tensor:
        """i32 ``[T, topk]`` by the generated kernels, by the plan ``kind``."""
        if self.layout == "paged":
            return selecting.select_paged(
                self.q, self.w, *self.paged, self.request, self.ke, topk, self.page, workspace, kind=kind
            )
        scale = None if self.scale is None else self.scale.flatten()
        return selecting.select_rows(
            self.q, self.w, self.keys.flatten(0, 1), scale, self.first, self.first + self.ke, topk, workspace, kind=kind
        )

    @functools.cached_property
    def first(self) -> torch.Tensor:
        """i32 ``[T]``, where the keys of each row begin in the contiguous layout."""
        return (self.request * self.keys.shape[1]).int()

    def logits(self, spec: Any, out: torch.Tensor) -> None:
        """Scores of every row into ``out`` f32 ``[T, keys]``, one launch; past a row's keys it stays as it is.

        The rows of a tile may look at contiguous keys of several requests, so the launch reaches over all of them.
        """
        dim = self.q.shape[2]
        shared = {
            "q_ptr": self.q, "w_ptr": self.w, "out_ptr": out, "rows": out.shape[0], "q_stride": self.q.stride(0),
            "w_stride": self.w.stride(0), "out_stride": out.stride(0), "end_ptr": self.ke,
        }  # fmt: skip
        if self.layout == "paged":
            cache, table = self.paged
            fp8 = self.store == "fp8"
            keys = {
                "key_ptr": cache.view(torch.float8_e4m3fn) if fp8 else cache, "table_ptr": table,
                "scale_ptr": cache.view(torch.float32) if fp8 else None, "request_ptr": self.request,
                "key_stride": cache.stride(0), "table_stride": table.stride(0), "limit": table.shape[1] * self.page,
            }  # fmt: skip
        else:
            keys = {
                "key_ptr": self.keys, "scale_ptr": self.scale, "start_ptr": self.first, "key_stride": dim,
                "end_ptr": self.first + self.ke, "limit": self.keys.shape[0] * self.keys.shape[1],
            }  # fmt: skip
        grid = (-(-out.shape[0] // spec.block_queries), -(-keys["limit"] // (spec.block_keys * SPAN)))
        launching.launch(spec, grid, self.q, shared | keys)

    def part(self, first: int, count: int) -> Problem:
        """Rows ``first`` to ``first + count``, over the same cache."""
        rows = slice(first, first + count)
        made = replace(self, q=self.q[rows], w=self.w[rows], request=self.request[rows], ke=self.ke[rows])
        made.__dict__["paged"] = self.paged
        return made

    @functools.cached_property
    def scores(self) -> torch.Tensor:
        """fp64 ``[T, keys]`` by the reference."""
        return torch.cat([score_reference.score(q.double(), w, k, s) for q, w, k, s in self._requests()])

    @functools.cached_property
    def band(self) -> torch.Tensor:
        """fp64 ``[T]``, how far a score may be off."""
        wider = FP8_ACCUMULATOR if self.store == "fp8" and self.q.is_cuda else 1.0
        return torch.cat([sum_band(*given) for given in self._requests()]) * wider

    def _requests(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        scales = self.scale if self.scale is not None else [None] * len(self.keys)
        given = [(self.request == number, k, s) for number, (k, s) in enumerate(zip(self.keys, scales, strict=True))]
        return [(self.q[mine], self.w[mine], k, s) for mine, k, s in given]

    @property
    def pairs(self) -> int:
        """Rows times the keys that each sees."""
        return int(self.ke.long().sum())


def problem(
    inputs: Inputs, *, heads: int, dim: int, store: str, layout: str, page: int, requests: int, ke: torch.Tensor
) -> Problem:
    """Random queries and keys; ``inputs.rows`` rows of ``requests`` in turn, ``ke`` i32 ``[rows]`` on the device."""
    keys, scales = [], []
    for _ in range(requests):
        raw = inputs.normal(inputs.keys, dim, dtype=torch.bfloat16) * inputs.normal(inputs.keys, 1).exp().bfloat16()
        made, scale = pack_reference.index_unpack(pack_reference.index_pack(raw, store=store), dim)
        keys.append(made.contiguous())
        scales.append(scale)
    q, w = prep_reference.index_prep(
        inputs.normal(inputs.rows, heads, dim, dtype=torch.bfloat16), inputs.normal(inputs.rows, heads),
        store=store, factor=(heads * dim) ** -0.5,
    )  # fmt: skip
    request = torch.arange(inputs.rows, device=inputs.device) * requests // inputs.rows
    scale = None if scales[0] is None else torch.stack(scales).contiguous()
    return Problem(q, w, torch.stack(keys), scale, request.int(), ke, page, layout, store)


def mixed(spec: Any, inputs: Inputs, topk: int) -> Problem:
    """Rows that see no key, one, topk, one more, and any number up to all; two requests."""
    edges = torch.tensor([0, 1, topk, topk + 1, inputs.keys], dtype=torch.int32)
    ke = inputs.integers(topk, inputs.keys + 1, inputs.rows)
    ke[: len(edges)] = edges.to(inputs.device)
    sizes = {name: getattr(spec, name) for name in ("heads", "dim", "store", "layout", "page")}
    return problem(inputs, **sizes, requests=2, ke=ke)


def compare(found: torch.Tensor, given: Problem, topk: int) -> str:
    """What is wrong with a selection, in words."""
    found, scores, ke, band = cpu(found, given.scores, given.ke, given.band)
    wanted = select_reference.select_scores(scores, ke, topk)
    try:
        compare_selected(found, wanted, scores, ke, topk, epsilon=band)
    except AssertionError as error:
        return str(error)
    return ""


def _selection(kind: str) -> Callable[[Any, Inputs], Case]:
    def build(spec: Any, inputs: Inputs) -> Case:
        given = mixed(spec, inputs, spec.topk)
        return Case(spec, lambda: (given.select(spec.topk, kind),), lambda found: compare(found[0], given, spec.topk))

    return build


def _merge(spec: Any, inputs: Inputs) -> Case:
    """The merge behind a split over bf16 pages, which every card multiplies."""
    sizes = {"heads": 4, "dim": 32, "page": 16} if spec.topk < 64 else {"heads": 32}
    arch = catalog.INTERPRETER if spec.topk < 64 else 90
    case = _selection("split")(catalog.split(topk=spec.topk, arch=arch, store="bf16", **sizes), inputs)
    return Case(spec, case.run, case.wrong)


def _logits(spec: Any, inputs: Inputs) -> Case:
    given = mixed(spec, inputs, 16)
    seen = torch.arange(inputs.keys, device=inputs.device) < given.ke[:, None]

    def run() -> Outputs:
        out = torch.zeros(inputs.rows, inputs.keys, device=inputs.device)
        given.logits(spec, out)
        return (out.where(seen, 0.0),)

    def wrong(found: Outputs) -> str:
        error = ((found[0].double() - given.scores).abs() - given.band[:, None]).where(seen, -torch.inf)
        return (
            "" if bool((error <= 0).all()) else f"{int((error > 0).sum())} scores are off by {float(error.max()):.1e}"
        )

    return Case(spec, run, wrong)


def _select(spec: Any, inputs: Inputs) -> Case:
    """Scores of few values, so that nearly every row ends in a tie; -0, NaN and infinities among them."""
    scores = inputs.integers(-4, 5, inputs.rows, inputs.keys).float() * -0.5
    scores[:, ::7] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], device=inputs.device)[
        torch.arange(len(scores[0, ::7]), device=inputs.device) % 4
    ]
    valid = inputs.integers(0, inputs.keys + 1, inputs.rows)
    wanted = select_reference.select_scores(scores.cpu(), valid.cpu(), spec.topk)
    return Case(spec, lambda: (select(spec, scores, valid),), lambda found: equal(found, (wanted,)))


def select(spec: Any, scores: torch.Tensor, valid: torch.Tensor, programs: int = 64) -> torch.Tensor:
    """i32 ``[T, topk]`` of scores f32 ``[T, columns]``, of which the first ``valid`` of a row count: one launch."""
    rows = scores.shape[0]
    programs = min(programs, rows)
    held = torch.empty(2, programs * spec.capacity, dtype=torch.int32, device=scores.device)
    out = torch.empty(rows, spec.topk, dtype=torch.int32, device=scores.device)
    arguments: Mapping[str, Any] = {
        "score_ptr": scores, "valid_ptr": valid, "out_ptr": out, "held_key_ptr": held[0], "held_id_ptr": held[1],
        "rows": rows, "score_stride": scores.stride(0), "out_stride": spec.topk,
    }  # fmt: skip
    launching.launch(spec, (programs,), scores, arguments)
    return out


ALL: Mapping[str, Callable[[Any, Inputs], Case]] = {
    **BUILDERS,
    "topk": _selection("fused"),
    "split": _selection("split"),
    "merge": _merge,
    "logits": _logits,
    "select": _select,
}
"""Family -> builder of its case."""
