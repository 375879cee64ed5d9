# SPDX-License-Identifier: Apache-2.0
"""Indices of selected keys: from a request's own count to slots of the cache, and from one rank to all."""

from __future__ import annotations

from pcp_kernels.generate import rows
from pcp_kernels.generate.text import Meta, module, next_power
from pcp_kernels.specs import KernelSpec, OwnerSpec, RemapSpec


def generate(spec: KernelSpec, interpret: bool) -> str:
    """Text of the kernel that maps indices to slots; grid ``rows``."""
    assert isinstance(spec, RemapSpec), spec
    signature = {
        "index_ptr": "*i32",
        "index_stride": "i64",
        "table_ptr": "*i32",
        "table_step": "i64",
        "request_ptr": "*i32",
        "slot_ptr": "*i32",
        "requests": "i32",
        "pages": "i32",
    } | ({"count_ptr": "*i32"} if spec.count else {})
    body = rows.define(
        signature,
        f"One row of {spec.topk} indices a program; an index that names no page of a request becomes -1.",
        f"""
        row = tl.program_id(0).to(tl.int64)
        request = tl.load(request_ptr + row).to(tl.int64)
        column = tl.arange(0, {next_power(spec.topk)})
        index = tl.load(index_ptr + row * index_stride + column, mask=column < {spec.topk}, other=-1)
        page = index // {spec.page}
        reach = tl.where((request >= 0) & (request < requests), pages, 0)
        found = (index >= 0) & (page < reach)
        block = tl.load(table_ptr + request * table_step + page, mask=found, other=-1)
        found = found & (block >= 0)
        slot = tl.where(found, block * {spec.page} + index % {spec.page}, -1)
        tl.store(slot_ptr + row * {spec.topk} + column, slot, mask=column < {spec.topk})
        """,
        "tl.store(count_ptr + row, tl.sum(found.to(tl.int32), axis=0))" if spec.count else None,
    )
    return module(
        spec,
        numerics="integers.",
        kernel=body,
        meta=Meta(signature, aligned=rows.strides(signature)),
        interpret=interpret,
    )


def generate_owner(spec: KernelSpec, interpret: bool) -> str:
    """Text of the kernel that picks each request's row where this rank has it; grid ``requests``."""
    assert isinstance(spec, OwnerSpec), spec
    signature = {"index_ptr": "*i32", "index_stride": "i64", "row_ptr": "*i64", "out_ptr": "*i32"}
    signature |= {"rows": "i32", "fill": "i32"}
    body = rows.define(
        signature,
        f"One request's {spec.topk} indices a program; a row that is not there is another rank's and becomes fill.",
        f"""
        request = tl.program_id(0).to(tl.int64)
        row = tl.load(row_ptr + request)
        column = tl.arange(0, {next_power(spec.topk)})
        kept = column < tl.where((row >= 0) & (row < rows), {spec.topk}, 0)
        index = tl.load(index_ptr + row * index_stride + column, mask=kept, other=0)
        index = tl.where(kept, index, fill)
        tl.store(out_ptr + request * {spec.topk} + column, index, mask=column < {spec.topk})
        """,
    )
    return module(
        spec,
        numerics="integers.",
        kernel=body,
        meta=Meta(signature, aligned=rows.strides(signature)),
        interpret=interpret,
    )
