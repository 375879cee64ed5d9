# SPDX-License-Identifier: Apache-2.0
"""Single lines of printed text: every kind survives, broken and hostile ones are named, constants stay beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from pcp_passes.errors import DumpError, PcpError
from pcp_passes.ir import fakes, invariants, rules
from pcp_passes.ir.opaque import UnknownOp
from pcp_passes.ir.parsing.parser import parse_graph
from pcp_passes.ir.parsing.syntax import read_statements
from pcp_passes.ir.printer import print_graph
from pcp_passes.passes import SHARDED, PassContext
from tests import toy_runs

CTX = PassContext(4)

LINES = [
    "%x : f32[4*s72, 128] = input",
    "%x : f32[(s0//2), 2*(((s0 + 3)//4))] = input",
    "%x : f32[Min(16, s46), Max(4, sT) - 1, s0**2, Mod(s0, 4)] = input",
    "%x : f32[u3, u3 + 2] = input",
    "%x : f32[64, 32] strides(1, 64) on cuda shard(1) = input",
    "%x : (f32[2], , i64[]) = input",
    "%x : ((f32[2], 128), layer 'model.0') = input",
    "%x : sym 1 - s0 = input",
    "%x : sym zf1 = input",
    "%x : sym (s0 < 4) & Ne(s0, 3) = input",
    "%x : sym sT replicate = input",
    "%x : -1.5 = input",
    "%x : 'some   # text' = input",
    "%x : f32[8] shard(0, 2, 3) rows shard(0) = input",
    "%x : (f32[8], f32[8]) (shard(0), replicate) = input",
    "%x : float8_e4m3fn[8] = input",
    "%x : f32[0] = attribute layers.0.offset #0123456789ab",
    "%x : f32[300000] = attribute big",
    "%x = attribute block",
    "%x = input   # layer model.0.attn  by some-pass  changed by other  because no rule for aten::cumsum",
    "%class_1 = input",
    "%0 = input",
]


@pytest.mark.parametrize("line", LINES)
def test_lines_of_every_kind_survive_the_round_trip(line: str) -> None:
    text = f"{line}\nreturn ()\n"
    assert print_graph(parse_graph(text).graph) == text


def test_statements_list_operands_and_what_they_call() -> None:
    call = "%c = aten.add.Tensor(%b, %a, k={'x': %b})"
    lines = read_statements(f"%a = input\n%b = %a.view(-1, [%a, 2:%a])\n{call}\nreturn %c")
    assert [s.operands for s in lines] == [(), ("a",), ("b", "a"), ("c",)]
    assert [s.called for s in lines] == ["input", ".view", "aten.add.Tensor", "return"]


# -- what is refused


@pytest.mark.parametrize(
    "line, found",
    [
        ("%x : f32[4 = input", "found '=' at column 12; required ','"),
        ("x = input", "found 'x'; required '%name = ...' or 'return ...'"),
        ("%x = input input", "found 'input' after the end of the statement"),
        ("%x = input $", r"found '\$' at column 12"),
        ("%x = aten.relu(%y)", "%y is read, but no line above defines it"),
        ("%a = input", "%a is defined twice"),
        ("%x : f33[2] = input", "'f33' is no dtype of this PyTorch"),
        ("%x : f32[T] = input", "unknown symbol 'T'"),
        ("%x : f32[open(2)] = input", "unknown function open"),
        ("%x : f32[s0//0] = input", "is no size"),
        ("%x : f32[9**9**9] = input", "a power of"),
        ("%x : f32[-3] = input", "is no tensor"),
        ("%x : f32[2] shard(1, 2, 3, 4) = input", "no placement of this version"),
        ("%x : f32[2] scattered = input", "no placement of this version"),
        ("%x = aten.relu(%a, 123456789012345678901234)", "a number of 24 digits"),
        ("%x = aten.relu(k=1, %a)", "a positional argument after one by keyword"),
        ("%x = aten.relu((%a))", "parentheses around one argument"),
        ("%x = aten.relu(" + "[" * 500 + "]" * 500 + ")", "nested more than 40 deep"),
        ("%x : f32[" + "(" * 500 + "2" + ")" * 500 + "] = input", "nested more than 40 deep"),
        ("%x : f32[" + "-" * 5000 + "2] = input", "nested more than 40 deep"),
        ("%x : f32[" + "1+" * 2000 + "1] = input", "a size of 4001 characters"),
        ("%x = aten.relu('" + "a" * 300_000 + "')", "at most 262144 are read"),
        ("%x = attribute forward", "cannot be an attribute"),
        ("%x = attribute __class__.__init__", "cannot be an attribute"),
    ],
)
def test_a_broken_line_is_named(line: str, found: str) -> None:
    with pytest.raises(DumpError, match=f"(?s)^some.txt, line 2: .*{found}"):
        parse_graph(f"%a = input\n{line}\nreturn %a", where="some.txt")


def test_a_text_that_is_cut_off_is_named() -> None:
    with pytest.raises(DumpError, match="found no 'return' line"):
        parse_graph("%a = input\n")


HOSTILE = [
    "os.system('echo hello')", "builtins.eval('1')", "builtins.__import__('os')", "torch.load('file')",
    "torch.ops.load_library('file')", "ops.load_library('file')", "aten.from_file('file', True, 8)",
    "torch.from_file('file', True, 8)", "operator.attrgetter('a')(%a)", "operator.methodcaller('a')",
    "subprocess.run(['true'])", "aten.__class__(%a)", "aten.relu.__init__(%a)", "torch.hub.load('a')",
    "higher_order.__class__(%a)", "torch.serialization.load('a')", "torch._C._nn.linear(%a)",
    "%a.__class__()", "%a.__reduce_ex__(2)", "%a._typed_storage()", "%a.numpy()", "%a.register_hook(%a)",
    "%a.apply_(%a)", "%a.no_such_method()",
]  # fmt: skip


@pytest.mark.parametrize("call", HOSTILE)
def test_only_tensor_functions_can_be_named(call: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DumpError, match="line 2"):
        parse_graph(f"%a : f32[4] = input\n%x : f32[4] = {call}\nreturn %x")
    assert list(tmp_path.iterdir()) == []


def test_a_huge_value_costs_no_memory() -> None:
    text = "%a : f32[1000000, 1000000] = input\n%x : f32[1000000, 1000000] = aten.relu(%a)\nreturn %x\n"
    text = text.replace("return", "%t : i64[1000000000000] = aten.arange(1000000000000)\nreturn")
    assert print_graph(parse_graph(text).graph) == text


def test_an_op_without_a_fake_is_not_run() -> None:
    library = torch.library.Library("pcp", "FRAGMENT")
    library.define("no_fake_for_parser(Tensor x) -> Tensor")
    ran: list[object] = []
    library.impl("no_fake_for_parser", lambda x: ran.append(x) or x, "CPU")
    parsed = parse_graph("%a : f32[4] = input\n%x : f32[4] = pcp.no_fake_for_parser(%a)\nreturn %x")
    assert parsed.stated == ("x",) and ran == []


# -- what is not loaded here

ABSENT = "%q : f32[s0, 8] = input\n%o : f32[s0, 8] = vllm.not_loaded_here.int(%q, x=<Box>)\nreturn %o\n"


def test_an_op_that_is_not_loaded_is_named_with_its_line() -> None:
    with pytest.raises(DumpError, match=r"line 2: vllm.not_loaded_here.int: not registered .*--import MODULE"):
        parse_graph(ABSENT)


def test_or_a_stand_in_that_prints_alike_and_cannot_run() -> None:
    parsed = parse_graph(ABSENT, strict=False)
    assert print_graph(parsed.graph) == ABSENT
    assert [u.partition(":")[0] for u in parsed.unknown] == ["vllm.not_loaded_here.int", "<Box>"]
    node = next(n for n in parsed.graph.nodes if n.name == "o")
    assert isinstance(node.target, UnknownOp) and rules.op_name(node) == "vllm::not_loaded_here"
    invariants.meta_fresh_full(parsed.graph, CTX)
    with pytest.raises(DumpError, match="cannot run here"):
        parsed.module()
    with pytest.raises(PcpError, match="is not loaded here"):
        node.target(torch.ones(3, 8))


def test_rules_of_ops_that_are_not_loaded_apply() -> None:
    text = (
        "%k : f32[s0, 2, 8] = input\n%v : f32[s0, 2, 8] = input\n%layer : layer 'l.0' = input\n"
        "%w : f32[0] = vllm.unified_kv_cache_update(%k, %v, %layer)\nreturn %w"
    )
    after, results = toy_runs.apply(SHARDED[:2], fx.GraphModule({}, parse_graph(text, strict=False).graph), CTX)
    assert results[1].rewrites == 2
    assert [n.name for n in after.graph.nodes][3:5] == ["reshard", "reshard_1"]


# -- constants


def with_constant() -> fx.GraphModule:
    root = nn.Module()
    root.register_buffer("offset", torch.arange(6, dtype=torch.float32).view(2, 3).t())
    graph = fx.Graph()
    x = graph.placeholder("x")
    offset = graph.get_attr("offset")
    total = graph.call_function(torch.add, (x, offset))
    graph.output(total)
    gm = fx.GraphModule(root, graph)
    mode = fakes.FakeTensorMode()
    for node, value in ((x, torch.zeros(3, 2)), (offset, root.offset), (total, torch.zeros(3, 2))):
        node.meta["val"] = mode.from_tensor(value)
    return gm


def test_constants_are_read_by_digest() -> None:
    from pcp_passes.dumps import small_constants

    gm = with_constant()
    text = print_graph(gm)
    parsed = parse_graph(text, small_constants(gm.graph))
    assert print_graph(parsed.graph) == text and "strides(1, 3) = attribute offset #" in text
    x = torch.ones(3, 2)
    assert torch.equal(parsed.module()(x), gm(x))


def test_a_constant_that_is_not_beside_the_text_keeps_its_digest() -> None:
    text = print_graph(with_constant())
    parsed = parse_graph(text)
    assert print_graph(parsed.graph) == text
    with pytest.raises(TypeError):
        parsed.module()(torch.ones(3, 2))


def test_one_attribute_cannot_have_two_contents() -> None:
    text = "%a : f32[2] = attribute c #0123456789ab\n%b : f32[2] = attribute c #ba9876543210\nreturn %a"
    with pytest.raises(DumpError, match="it has two contents"):
        parse_graph(text)
