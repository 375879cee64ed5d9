# SPDX-License-Identifier: Apache-2.0
import operator
import re
from pathlib import Path

import pytest
import torch
from torch import fx

import pcp_passes
from pcp_passes.ir import fakes, meta
from pcp_passes.ir.placements import RankMajor, Replicate, Shard
from tests import toy_runs

pytestmark = pytest.mark.unit


def node() -> fx.Node:
    return fx.Graph().placeholder("x")


def test_meta_is_touched_in_one_module_only() -> None:
    root = Path(pcp_passes.__file__).parent
    owned = [
        *root.glob("ir/*.py"),
        *root.glob("passes/*.py"),
        *(root / f"{n}.py" for n in ("collectives", "simulate", "report")),
    ]
    pattern = re.compile(r"(?<!\bself)(?<!\bgm)(?<!\bmodule)\.meta\b(?!\.py)(?=[\[.=\s])")
    found = [path.name for path in owned if path.name != "meta.py" and any(
        pattern.search(line) and not line.lstrip().startswith(("from", "import", "#", '"""', "``"))
        for line in path.read_text().splitlines()
    )]  # fmt: skip
    assert found == []
    assert pattern.search("node.meta['x']"), "the search can find one"


@pytest.mark.parametrize(
    "raw, clean",
    [
        ("L['self'].model.layers[0].self_attn", "model.layers.0.self_attn"),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self']", ""),
        ("model.layers.0", "model.layers.0"),
        ("L['fn'].layers['a'].b", "fn.layers.a.b"),
    ],
)
def test_module_paths_read_as_users_know_them(raw: str, clean: str) -> None:
    where = node()
    where.meta["nn_module_stack"] = {"outer": ("L['self']", object), "inner": (raw, object)}
    assert meta.module_path(where) == clean


def test_source_lines_name_the_innermost_frame_without_its_folder() -> None:
    where = node()
    assert meta.source_line(where) == ""
    where.meta["stack_trace"] = (
        '  File "/a/b/outer.py", line 3, in f\n    g()\n  File "/a/b/inner.py", line 21, in g\n    x'
    )
    assert meta.source_line(where) == "inner.py:21"


def test_records_are_per_node_and_survive_updates() -> None:
    one, two = node(), node()
    meta.set_placement(one, Shard(0))
    meta.set_layer(one, "attn")
    assert (meta.placement(one), meta.info(one).layer, meta.placement(two)) == (Shard(0), "attn", None)
    meta.set_placement(one, RankMajor())
    assert (meta.placement(one), meta.info(one).layer) == (RankMajor(), "attn")
    assert [str(p) for p in (Shard(1), RankMajor(), Replicate())] == ["shard(1)", "rank_major", "replicate"]


@pytest.mark.parametrize("key", ["example_value", "val"])
def test_a_new_value_is_stored_under_the_key_of_its_operands(key: str) -> None:
    x = node()
    x.meta[key] = torch.ones(2)
    y = x.graph.call_function(torch.neg, (x,))
    meta.set_value(y, torch.ones(2))
    assert list(y.meta) == [key]
    assert torch.equal(meta.value(y), torch.ones(2))


def test_values_are_computed_on_the_graphs_own_fakes() -> None:
    gm = toy_runs.traced(lambda x: (x * 2).split([1, 3], 1)[1].t(), torch.randn(6, 4))
    for found in gm.graph.nodes:
        if found.op not in ("call_function", "call_method"):
            continue
        stated, computed = meta.value(found), meta.compute_value(found)
        for a, b in zip(fakes.tensors_in(stated), fakes.tensors_in(computed), strict=True):
            assert str(a.shape) == str(b.shape)
            assert str(a.stride()) == str(b.stride())
            assert b.fake_mode is a.fake_mode
    assert any(found.target is operator.getitem for found in gm.graph.nodes)


def test_a_value_without_fakes_is_our_bug() -> None:
    x = node()
    y = x.graph.call_function(torch.neg, (x,))
    with pytest.raises(AssertionError, match="%neg has no fake tensor operand"):
        meta.compute_value(y)
    with pytest.raises(AssertionError, match="no value can be computed for a placeholder node"):
        meta.compute_value(x)
