# SPDX-License-Identifier: Apache-2.0
"""What may be inside a captured piece, what may not, and the reason given."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch

from pcp_passes.collectives import all_gather_rows_op
from pcp_passes.errors import Refusal
from pcp_passes.frontends.torch.fresh import FreshSpace, fresh_space
from pcp_passes.ir import meta
from pcp_passes.ir.markers import reshard_op
from pcp_passes.ir.opaque import Layer
from pcp_passes.paged import ops as paged
from pcp_passes.paged.experts import experts_op
from pcp_passes.paged.records import pack_record_op, record_write_op
from pcp_passes.piecewise.cuts import base_of, is_size, is_view, odd_size, part_of, reason_to_cut, row_symbol

pytestmark = pytest.mark.unit
ATEN: Any = torch.ops.aten


class Made:
    """Nodes of a graph over fake rows ``[M, 8]``."""

    def __init__(self) -> None:
        self.space: FreshSpace = fresh_space(5, 7)
        self.graph = torch.fx.Graph()
        self.rows = self.placeholder("x", self.space.rows, 8)

    def placeholder(self, name: str, *shape: Any) -> torch.fx.Node:
        node = self.graph.placeholder(name)
        with self.space.fake_mode:
            meta.set_aten_value(node, torch.empty(shape, dtype=torch.float64))
        return node

    def call(self, target: Any, *args: Any, value: Any = None, **kwargs: Any) -> torch.fx.Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        meta.set_value(node, meta.compute_value(node) if value is None else value)
        return node


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.mark.parametrize(
    ("target", "rest", "reason"),
    [
        (paged.kv_write_op, ("x", "target.0"), "writes the cache"),
        (paged.index_write_op, ("target.0",), "writes the cache"),
        (record_write_op, ("target.0", 4, 4, 0), "writes the cache"),
        (paged.kv_attend_op, ("x", "target.0"), "attends over the cache"),
        (paged.mla_attend_op, ("x", "target.0"), "attends over the cache"),
        (paged.index_topk_op, ("x", "x", "target.0", 4), "scores the cached index keys"),
        (experts_op, ("x", "x", "x", "x", "silu"), "on the host"),
        (reshard_op, ("shard", "rank_major", 2, "pcp"), "not lowered"),
        (all_gather_rows_op, (2, "pcp"), "a collective"),
        (ATEN._local_scalar_dense.default, (), "on the host"),
        (torch.nn.functional.silu, (), None),
        (ATEN.linear.default, ("x",), None),
        (pack_record_op, ("x", None, "fp8"), None),
    ],
)
def test_reasons(made: Made, target: Any, rest: tuple[Any, ...], reason: str | None) -> None:
    args = [made.rows if one == "x" else one for one in rest]
    node = made.call(target, made.rows, *args, value=meta.value(made.rows))
    found = reason_to_cut(node)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")


def test_collectives_may_be_inside_by_option(made: Made) -> None:
    node = made.call(all_gather_rows_op, made.rows, 2, "pcp")
    assert reason_to_cut(node, "outside") and reason_to_cut(node, "inside") is None


def test_an_op_that_takes_a_layer_name_is_a_cut(made: Made) -> None:
    layer = made.graph.placeholder("layer")
    meta.set_aten_value(layer, Layer("layers.0"))
    moe = made.call(torch.sin, made.rows, layer, value=meta.value(made.rows))
    assert "name of its layer" in str(reason_to_cut(moe))


def test_a_size_that_depends_on_data_is_a_cut(made: Made) -> None:
    with made.space.fake_mode:
        hits = made.space.shape_env.create_unbacked_symint()
        found = torch.empty(hits, 1, dtype=torch.int64)
    nonzero = made.call(ATEN.nonzero.default, made.rows, value=found)
    assert "depends on data" in str(reason_to_cut(nonzero))
    size = made.call(ATEN.sym_size.int, nonzero, 0, value=hits)
    assert not is_size(size) and "depends on data" in str(reason_to_cut(size))
    assert is_size(made.call(ATEN.sym_size.int, made.rows, 0, value=made.space.rows))


def test_views_and_kernels(made: Made) -> None:
    view = made.call(ATEN.view.default, made.rows, [-1, 2, 4])
    halves = made.call(ATEN.split.Tensor, view, 2, -1)
    half = made.call(torch.ops.aten.select.int, view, 1, 0)
    part = made.graph.call_function(operator.getitem, (halves, 1))
    meta.set_value(part, meta.value(halves)[1])
    flat = made.call(torch.flatten, view, 1)
    for node in (view, halves, half, part, flat, made.call(ATEN._unsafe_view.default, made.rows, [-1, 4, 2])):
        assert is_view(node) and base_of(node) is made.rows
    best = made.call(ATEN.topk.default, made.rows, 2)
    values = made.graph.call_function(operator.getitem, (best, 0))
    meta.set_value(values, meta.value(best)[0])
    for node in (best, values, made.call(ATEN.clone.default, view), made.call(torch.cat, [view, view], 1)):
        assert not is_view(node) and base_of(node) is node
    assert part_of(values) is best and part_of(best) is best and part_of(part) is halves


def test_sizes_that_do_not_cross(made: Made) -> None:
    symbol, rows = row_symbol(made.graph), made.space.rows
    with made.space.fake_mode:
        assert odd_size(torch.empty(1, rows, 3), symbol) is None and odd_size(torch.empty(4, 3), symbol) is None
        assert "a size of 2*sM" in str(odd_size(torch.empty(2 * rows, 3), symbol))
        assert "two dimensions" in str(odd_size(torch.empty(rows, rows), symbol))
        assert "a size of sT" in str(odd_size(torch.empty(made.space.tokens), symbol))


def test_a_body_has_one_token_symbol(made: Made) -> None:
    made.placeholder("w", 3, 3)
    assert row_symbol(made.graph) == made.space.rows.node.expr
    made.placeholder("y", made.space.tokens, 8)
    with pytest.raises(Refusal, match="one token symbol") as caught:
        row_symbol(made.graph)
    assert "sM" in str(caught.value) and "sT" in str(caught.value)


def test_no_input_is_a_size(made: Made) -> None:
    size = made.graph.placeholder("n")
    meta.set_aten_value(size, made.space.rows)
    with pytest.raises(Refusal, match="an input is a size"):
        row_symbol(made.graph)
