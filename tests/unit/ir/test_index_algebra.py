# SPDX-License-Identifier: Apache-2.0
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from pcp_passes.errors import ConfigError
from pcp_passes.ir import meta, rules
from pcp_passes.ir.index.algebra import analyse, assumptions_wanted, holds, recognise, unknown_source
from pcp_passes.ir.index.values import IndexValue, Visible, visibility
from tests.symbolic import captured, closed_form, outcome, wrong_elements

pytestmark = pytest.mark.unit
LOW = torch.finfo(torch.float32).min
INF = float("-inf")


def hf_packed(n: int) -> torch.Tensor:
    """Segment numbers of packed sequences, as transformers finds them: positions that do not grow by one."""
    positions = torch.arange(n)[None]
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)


def hf_causal(n: int) -> torch.Tensor:
    batch = torch.arange(1)[:, None, None, None]
    q, k = torch.arange(n)[None, None, :, None], torch.arange(n)[None, None, None, :]
    packed = hf_packed(n)
    same = packed[batch, q] == packed[batch, k]
    return (q.new_ones((), dtype=torch.bool) & (k <= q) & same).expand(1, -1, n, n)


def grid(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(n)[:, None], torch.arange(n)[None, :]


FORMS: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "arange": (lambda n: torch.arange(n), "i0"),
    "arange with start and step": (lambda n: torch.arange(2, 2 + 3 * n, 3), "3*i0 + 2"),
    "arange down": (lambda n: torch.arange(n - 1, -1, -1), "s + -i0 - 1"),
    "dims of size one carry no index": (lambda n: torch.arange(1)[:, None].expand(1, n) + torch.arange(n), "i1"),
    "views": (lambda n: torch.arange(n).view(1, 1, n, 1).permute(0, 2, 3, 1).squeeze(0), "i0"),
    "flip": (lambda n: torch.arange(n).flip(0), "s + -i0 - 1"),
    "slices": (lambda n: torch.arange(2 * n)[1::2], "2*i0 + 1"),
    "slice from the end": (lambda n: torch.arange(n)[-1:], "s - 1"),
    "select": (lambda n: (torch.arange(n)[:, None] + 10 * torch.arange(n))[3], "10*i0 + 3"),
    "gather by positions": (lambda n: (2 * torch.arange(n))[torch.arange(n)[:, None]], "2*i0"),
    "cumsum of ones": (lambda n: torch.ones(n, dtype=torch.long).cumsum(0) - 1, "i0"),
    "diff": (lambda n: torch.diff(torch.arange(n), prepend=torch.arange(1) - 1), "1"),
    "packed segments of one sequence": (hf_packed, "0"),
    "cat of one range": (lambda n: torch.cat([torch.arange(n), torch.arange(n, 2 * n)]), "i0"),
    "floor": (lambda n: torch.arange(4 * n) // 4 * 4, "4*(i0)//4"),
    "remainder": (lambda n: torch.arange(n) % 4, "i0 + -4*(i0)//4"),
    "clamp that does nothing": (lambda n: torch.arange(n).clamp(min=0), "i0"),
    "bool to float": (lambda n: (torch.arange(n) < 0).float(), "0"),
    "count of tokens": (lambda n: torch.ones(1, n, dtype=torch.long).sum(-1), "s"),
    "triangle": (lambda n: torch.ones(n, n).tril(), "1 if i0 - i1 >= 0; 0 if i1 - i0 - 1 >= 0"),
    "known by one operand": (lambda n: (torch.arange(n) < 0) & (torch.rand(n) < 0.5), "False"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_closed_forms(name: str) -> None:
    function, expected = FORMS[name]
    gm = captured(function)
    values = analyse(gm.graph)
    value = outcome(gm, values)
    symbol = str(meta.tensor(next(iter(gm.graph.nodes))).shape[0])  # type: ignore[union-attr]
    assert str(value).replace(symbol, "s").replace("s - i0", "s + -i0") == expected.replace("+ -", "- ").replace(
        "s - i0", "s + -i0"
    )
    for tokens in (4, 5, 9):
        assert not wrong_elements(gm, values, tokens)


UNKNOWN: dict[str, Callable[[int], torch.Tensor]] = {
    "random numbers": lambda n: torch.rand(n) < 0.5,
    "an op outside the table": lambda n: torch.sort(torch.arange(n)).values,
    "positions in half precision": lambda n: torch.arange(n).to(torch.bfloat16),
    "positions in small integers": lambda n: torch.arange(n).to(torch.uint8),
    "ones counted in half precision": lambda n: torch.ones(n, dtype=torch.float16).cumsum(0),
    "a true division": lambda n: torch.arange(n) / 2,
    "a product of positions": lambda n: torch.arange(n) * torch.arange(n),
    "a gather that may count from the end": lambda n: torch.arange(n)[torch.arange(n) - 1],
    "a slice that may be cut at the start": lambda n: torch.arange(n)[-3:],
    "pieces of two ranges": lambda n: torch.cat([torch.arange(n), torch.arange(n)]),
    "a sum of positions": lambda n: torch.arange(n).cumsum(0),
    "a merge of two dims": lambda n: torch.arange(n)[:, None].expand(n, n).reshape(-1),
    "a bit trick": lambda n: torch.arange(n) & 1,
    "not a number": lambda n: torch.zeros(n) * float("nan"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_not_proved_has_no_closed_form(name: str) -> None:
    assert closed_form(UNKNOWN[name]) is None


def masks_by_name() -> dict[str, tuple[Callable[[int], torch.Tensor], Visible]]:
    causal, full = Visible(right=0), Visible()

    def on_grid(rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[int], torch.Tensor]:
        return lambda n: rule(*grid(n))

    return {
        "transformers, causal": (hf_causal, causal),
        "j <= i": (on_grid(lambda i, j: j <= i), causal),
        "i >= j": (on_grid(lambda i, j: i >= j), causal),
        "not j > i": (on_grid(lambda i, j: ~(j > i)), causal),
        "i - j > -1": (on_grid(lambda i, j: i - j > -1), causal),
        "j < i + 1": (on_grid(lambda i, j: j < i + 1), causal),
        "tril of bools": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), causal),
        "tril of floats as bools": (lambda n: torch.tril(torch.ones(n, n)).bool(), causal),
        "triu inverted": (lambda n: torch.triu(torch.ones(n, n), diagonal=1) == 0, causal),
        "fill of lowest by triu": (lambda n: torch.triu(torch.full((n, n), LOW), diagonal=1), causal),
        "one minus mask times lowest": (lambda n: (1.0 - torch.ones(n, n).tril()) * LOW, causal),
        "where": (on_grid(lambda i, j: torch.where(j <= i, 0.0, INF)), causal),
        "masked_fill": (on_grid(lambda i, j: torch.zeros(i.shape[0], i.shape[0]).masked_fill(j > i, INF)), causal),
        "sum of two float masks": (
            on_grid(lambda i, j: torch.where(j <= i, 0.0, LOW) + torch.where(j > i - 4, 0.0, LOW)),
            Visible(3, 0),
        ),
        "masked twice": (
            on_grid(lambda i, j: torch.where(j <= i, torch.where(j > i - 4, 0.0, INF), INF)),
            Visible(3, 0),
        ),
        "window with >": (on_grid(lambda i, j: (j > i - 4) & (j <= i)), Visible(3, 0)),
        "window with >=": (on_grid(lambda i, j: (j >= i - 4) & (j <= i)), Visible(4, 0)),
        "window by difference": (on_grid(lambda i, j: (i - j < 4) & (i - j >= 0)), Visible(3, 0)),
        "window by two triangles": (
            lambda n: torch.ones(n, n, dtype=torch.bool).tril() & torch.ones(n, n, dtype=torch.bool).triu(-3),
            Visible(3, 0),
        ),
        "two windows": (on_grid(lambda i, j: (j > i - 4) & (j > i - 9) & (j <= i)), Visible(3, 0)),
        "both sides by abs": (on_grid(lambda i, j: (i - j).abs() <= 2), Visible(2, 2)),
        "both sides": (on_grid(lambda i, j: (j - i < 3) & (i - j < 6)), Visible(5, 2)),
        "to the right only": (on_grid(lambda i, j: j >= i), Visible(0, -1)),
        "the diagonal": (on_grid(lambda i, j: i == j), Visible(0, 0)),
        "chunks": (on_grid(lambda i, j: (i // 4 == j // 4) & (j <= i)), Visible(-1, 0, 4)),
        "chunks and window": (on_grid(lambda i, j: (i // 8 == j // 8) & (j <= i) & (j > i - 4)), Visible(3, 0, 8)),
        "nested chunks": (on_grid(lambda i, j: (i // 4 == j // 4) & (i // 8 == j // 8)), Visible(-1, -1, 4)),
        "chunks by difference": (
            on_grid(lambda i, j: torch.div(i, 4, rounding_mode="floor") - torch.div(j, 4, rounding_mode="floor") == 0),
            Visible(-1, -1, 4),
        ),
        "all": (on_grid(lambda i, j: (i >= 0) & (j < i.shape[0])), full),
        "nothing hidden": (lambda n: torch.zeros(1, 1, n, n), full),
        "one row for all": (lambda n: torch.ones(1, 1, 1, n, dtype=torch.bool), full),
        "exclusive or": (on_grid(lambda i, j: (j > i) ^ torch.ones_like(j, dtype=torch.bool)), causal),
    }  # fmt: skip


MASKS = masks_by_name()


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_read(name: str) -> None:
    function, expected = MASKS[name]
    gm = captured(function)
    values = analyse(gm.graph)
    value = outcome(gm, values)
    assert value is not None and visibility(value) == expected
    for tokens in (4, 5, 9, 17):
        assert not wrong_elements(gm, values, tokens)
        assert torch.equal(shown_by(expected, tokens), shown_in(gm, tokens))


def shown_by(seen: Visible, n: int) -> torch.Tensor:
    i, j = grid(n)
    out = torch.ones(n, n, dtype=torch.bool)
    out &= (i - j <= seen.left) if seen.left >= 0 else True
    out &= (j - i <= seen.right) if seen.right >= 0 else True
    return out & (i // seen.chunk == j // seen.chunk) if seen.chunk else out


def shown_in(gm: fx.GraphModule, n: int) -> torch.Tensor:
    mask = gm(torch.zeros(n))
    mask = mask if mask.dtype == torch.bool else mask == 0
    return mask.expand(*mask.shape[:-2], n, n).reshape(-1, n, n)[0]


NO_WINDOW: dict[str, Callable[[int], torch.Tensor]] = {
    "no row sees itself": lambda n: grid(n)[1] < grid(n)[0],
    "a prefix for all": lambda n: (grid(n)[1] <= grid(n)[0]) | (grid(n)[1] < 3),
    "one column hidden": lambda n: (grid(n)[1] <= grid(n)[0]) & (grid(n)[1] != 2),
    "dilated": lambda n: (grid(n)[1] <= grid(n)[0]) & ((grid(n)[0] - grid(n)[1]) % 2 == 0),
    "chunks that do not nest": lambda n: (grid(n)[0] // 4 == grid(n)[1] // 4) & (grid(n)[0] // 6 == grid(n)[1] // 6),
    "chunks from another origin": lambda n: (grid(n)[0] + 1) // 4 == (grid(n)[1] + 1) // 4,
    "chunks of twice the keys": lambda n: grid(n)[0] // 4 == 2 * grid(n)[1] // 4,
    "a window that grows": lambda n: 2 * grid(n)[1] >= grid(n)[0],
    "reversed": lambda n: grid(n)[1] <= n - 1 - grid(n)[0],
    "a penalty, not a mask": lambda n: torch.where(grid(n)[1] <= grid(n)[0], 0.0, -1e4),
    "a bias where visible": lambda n: torch.where(grid(n)[1] <= grid(n)[0], 1.0, INF),
    "nothing visible": lambda n: torch.zeros(n, n, dtype=torch.bool),
    "another for each head": lambda n: torch.arange(2)[:, None, None] + grid(n)[1] <= grid(n)[0],
    "transposed": lambda n: (grid(n)[1] < grid(n)[0]).transpose(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_WINDOW)
def test_masks_that_are_known_but_no_window(name: str) -> None:
    gm = captured(NO_WINDOW[name])
    values = analyse(gm.graph)
    value = outcome(gm, values)
    assert value is not None and visibility(value) is None
    for tokens in (4, 5, 9):
        assert not wrong_elements(gm, values, tokens)


def test_off_by_one_masks_are_told_apart() -> None:
    seen = {
        name: visibility(outcome(gm, analyse(gm.graph)))  # type: ignore[arg-type]
        for name, gm in (
            ("< 4", captured(lambda n: grid(n)[0] - grid(n)[1] < 4)),
            ("<= 4", captured(lambda n: grid(n)[0] - grid(n)[1] <= 4)),
            ("j <= i + 1", captured(lambda n: grid(n)[1] <= grid(n)[0] + 1)),
        )
    }
    assert seen == {"< 4": Visible(3), "<= 4": Visible(4), "j <= i + 1": Visible(right=1)}


def test_float16_may_hide_with_its_lowest_number() -> None:
    low = torch.finfo(torch.float16).min
    gm = captured(lambda n: torch.where(grid(n)[1] <= grid(n)[0], 0.0, low).to(torch.float16))
    value = outcome(gm, analyse(gm.graph))
    assert value is not None
    assert visibility(value) is None
    assert visibility(value, half=True) == Visible(right=0)


CONSTANTS: dict[str, Callable[[int], torch.Tensor]] = {
    "bfloat16": lambda n: (torch.full((n,), 0.1, dtype=torch.bfloat16) + 1) * 3,
    "float16 overflows": lambda n: torch.full((n,), 60000.0, dtype=torch.float16) * 2,
    "float32 beyond its integers": lambda n: torch.full((n,), 2.0**24) + 1,
    "float32 lowest to float16": lambda n: torch.full((n,), LOW).to(torch.float16),
    "integers that wrap": lambda n: torch.full((n,), 2**24, dtype=torch.int32) * 2**10,
    "a power": lambda n: torch.full((), 0.25) ** torch.ones(n, dtype=torch.int32),
    "a float cut to an integer": lambda n: torch.full((n,), 2.5).floor().long() + n,
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_round_as_their_dtype_does(name: str) -> None:
    gm = captured(CONSTANTS[name])
    values = analyse(gm.graph)
    assert values and not wrong_elements(gm, values, 5)


class Buffers(torch.nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        for name, held in buffers.items():
            self.register_buffer(name, held)


def with_buffer(held: torch.Tensor, read: Callable[[torch.Tensor, int], torch.Tensor]) -> IndexValue | None:
    """The closed form of what is read from a constant of the graph."""
    gm = captured(lambda n, x: read(x, n), held)
    source = list(gm.graph.nodes)[1]
    gm.register_buffer("held", held)
    with gm.graph.inserting_before(source):
        constant = gm.graph.get_attr("held")
    constant.meta["val"] = source.meta["val"]
    source.replace_all_uses_with(constant)
    return outcome(gm, analyse(gm.graph))


def test_constant_tables_are_recognised_by_their_elements() -> None:
    table, triangle = torch.arange(512)[None], torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
    assert str(with_buffer(table, lambda x, n: x[:, :n])) == "i1"
    value = with_buffer(triangle, lambda x, n: x[:, :, :n, :n])
    assert value is not None and visibility(value) == Visible(right=0)
    assert str(with_buffer(torch.tensor(-1.5), lambda x, n: x.expand(n))) == "-1.5"
    table[0, 300] += 1
    assert with_buffer(table, lambda x, n: x[:, :n]) is None
    triangle[0, 0, 40, 3] = False
    assert with_buffer(triangle, lambda x, n: x[:, :, :n, :n]) is None


def test_assumptions_decide_masks_of_inputs() -> None:
    def program(n: int, positions: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        rows = positions[0, :, None]
        return (positions[0, None, :] <= rows) & padding.bool()[:, None, :]

    inputs = (torch.arange(5)[None], torch.ones(1, 5, dtype=torch.long))
    gm = captured(program, *inputs)
    positions, padding = (node.name for node in list(gm.graph.nodes)[1:3])
    assert outcome(gm, analyse(gm.graph)) is None
    assert outcome(gm, analyse(gm.graph, {positions: "iota"})) is None
    value = outcome(gm, analyse(gm.graph, {positions: "iota", padding: "ones"}))
    assert value is not None and visibility(value) == Visible(right=0)
    assert assumptions_wanted(gm.graph) == {positions: ("iota", "ones"), padding: ("iota", "ones")}
    result = next(iter(reversed(gm.graph.nodes))).args[0]
    assert unknown_source(result, analyse(gm.graph, {positions: "iota"})).name == padding  # type: ignore[arg-type]


def test_windows_of_a_table_are_assumed() -> None:
    table = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril().triu(-2)
    gm = captured(lambda n, x: x[:, :, :n, :n], table)
    name = list(gm.graph.nodes)[1].name
    value = outcome(gm, analyse(gm.graph, {name: "window 3"}))
    assert value is not None and visibility(value) == Visible(2, 0)


def test_token_ids_are_not_worth_an_assumption() -> None:
    gm = captured(lambda n, ids, table: torch.nn.functional.embedding(ids.view(-1, n), table),
                  torch.zeros(1, 5, dtype=torch.long), torch.zeros(9, 4))  # fmt: skip
    assert assumptions_wanted(gm.graph) == {}


def test_assumptions_that_cannot_be_are_refused() -> None:
    gm = captured(lambda n, x: x + 1, torch.zeros(5, dtype=torch.bfloat16))
    name = list(gm.graph.nodes)[1].name
    with pytest.raises(ConfigError, match="required a placeholder of the graph: "):
        analyse(gm.graph, {"mask": "ones"})
    with pytest.raises(ConfigError, match="cannot hold"):
        analyse(gm.graph, {name: "iota"})
    with pytest.raises(ConfigError, match="no tensor with enough dimensions"):
        analyse(gm.graph, {name: "tril"})
    with pytest.raises(ConfigError, match="required one of iota, ones, zeros, tril, window N"):
        analyse(gm.graph, {name: "twos"})


@pytest.mark.parametrize(
    "assumption, tensor",
    [
        ("iota", torch.arange(6).expand(2, 6)),
        ("ones", torch.ones(2, 6, dtype=torch.bool)),
        ("zeros", torch.zeros(6)),
        ("tril", torch.ones(4, 4).tril()),
        ("tril", torch.ones(4, 6, dtype=torch.bool).tril()),
        ("window 3", torch.ones(1, 1, 9, 9, dtype=torch.bool).tril().triu(-2)),
    ],
)
def test_a_real_tensor_is_checked_against_an_assumption(assumption: Any, tensor: torch.Tensor) -> None:
    assert holds(assumption, tensor) and recognise(tensor) == assumption
    broken = tensor.clone()
    broken[(0,) * tensor.dim()] = 1 - broken[(0,) * tensor.dim()].int() if assumption != "iota" else 7
    assert not holds(assumption, broken) and recognise(broken) is None


def test_an_unknown_node_is_named() -> None:
    gm = captured(lambda n: (torch.arange(n) <= torch.rand(n)) & (torch.arange(n) < 3))
    result = next(iter(reversed(gm.graph.nodes))).args[0]
    assert rules.op_name(unknown_source(result, analyse(gm.graph))) == "aten::rand"  # type: ignore[arg-type]
