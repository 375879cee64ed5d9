# SPDX-License-Identifier: Apache-2.0
"""No closed form is ever wrong: random programs against their real values, and a check that the check can fail."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.ir import predicates as p
from pcp_passes.ir.index import algebra, moves, ops
from pcp_passes.ir.index.algebra import analyse
from tests.symbolic import captured, wrong_elements

pytestmark = pytest.mark.unit
INF = float("-inf")


def _row(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.expand(n, n)[1] if x.dim() == 2 else x.expand(n)


def _place(x: torch.Tensor, n: int) -> torch.Tensor:
    return _row(x.long(), n).clamp(0, n - 1)


def _at(x: torch.Tensor, by: torch.Tensor, n: int) -> torch.Tensor:
    return _row(x, n)[_place(by, n)]


def _column(x: torch.Tensor, n: int) -> torch.Tensor:
    return _row(x, n)[:, None]


Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, int], torch.Tensor]
STEPS: dict[str, Step] = {
    "add": lambda a, b, c, k, n: a.long() + b.long(),
    "alpha": lambda a, b, c, k, n: torch.add(a.long(), b.long(), alpha=k),
    "sub": lambda a, b, c, k, n: a.long() - b.long(),
    "rsub": lambda a, b, c, k, n: k - a.long(),
    "scale": lambda a, b, c, k, n: a.long() * k,
    "float scale": lambda a, b, c, k, n: a.float() * k + 1.0,
    "half": lambda a, b, c, k, n: a.bfloat16() + 1,
    "floor": lambda a, b, c, k, n: a.long() // (abs(k) + 1),
    "modulo": lambda a, b, c, k, n: a.long() % (abs(k) + 1),
    "abs": lambda a, b, c, k, n: a.long().abs(),
    "neg": lambda a, b, c, k, n: -a.long(),
    "least": lambda a, b, c, k, n: torch.minimum(a.long(), b.long()),
    "most": lambda a, b, c, k, n: torch.maximum(a.long(), b.long()),
    "clamp": lambda a, b, c, k, n: a.long().clamp(min=k, max=k + 3),
    "le": lambda a, b, c, k, n: a <= b,
    "lt": lambda a, b, c, k, n: a.long() < b.long() + k,
    "ge": lambda a, b, c, k, n: a >= k,
    "gt": lambda a, b, c, k, n: a > b,
    "eq": lambda a, b, c, k, n: a == b,
    "ne": lambda a, b, c, k, n: a != k,
    "and": lambda a, b, c, k, n: a.bool() & b.bool(),
    "or": lambda a, b, c, k, n: a.bool() | b.bool(),
    "xor": lambda a, b, c, k, n: a.bool() ^ b.bool(),
    "logical": lambda a, b, c, k, n: torch.logical_and(a, b),
    "not": lambda a, b, c, k, n: ~a.bool(),
    "where": lambda a, b, c, k, n: torch.where(a.bool(), b.long(), c.long()),
    "where number": lambda a, b, c, k, n: torch.where(a.bool(), float(k), INF),
    "fill": lambda a, b, c, k, n: a.float().masked_fill(b.bool(), -5.5),
    "int32": lambda a, b, c, k, n: a.to(torch.int32),
    "turn": lambda a, b, c, k, n: a.expand(n, n).transpose(0, 1),
    "flip": lambda a, b, c, k, n: a.expand(n, n).flip(1),
    "row": lambda a, b, c, k, n: _row(a, n),
    "column": lambda a, b, c, k, n: _column(a, n),
    "gather": lambda a, b, c, k, n: _at(a, b, n),
    "pairs": lambda a, b, c, k, n: a.expand(n, n)[_place(b, n)[:, None], _place(c, n)],
    "shift": lambda a, b, c, k, n: torch.cat([_row(a, n)[1:], _row(a, n)[:1]]),
    "double": lambda a, b, c, k, n: torch.cat([_row(a, n), _row(a, n)])[1 : n + 1],
    "every other": lambda a, b, c, k, n: torch.cat([_row(a, n), _row(b, n)])[::2],
    "last": lambda a, b, c, k, n: _row(a, n)[-1:],
    "diff": lambda a, b, c, k, n: torch.diff(_row(a.long(), n), prepend=_row(a.long(), n)[:1] - k),
    "cumsum": lambda a, b, c, k, n: _row(a, n).cumsum(0),
    "tril": lambda a, b, c, k, n: a.expand(n, n).tril(k),
    "triu": lambda a, b, c, k, n: a.expand(n, n).triu(k),
    "total": lambda a, b, c, k, n: a.expand(n, n).sum(1),
    "any": lambda a, b, c, k, n: a.bool().expand(n, n).any(1),
    "view": lambda a, b, c, k, n: a.expand(n, n).reshape(1, n, 1, n)[0].permute(1, 2, 0)[0],
    "flat": lambda a, b, c, k, n: a.expand(n, n).reshape(-1).view(n, n),
}  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int, int, int]]:
    length = draw(st.integers(1, 7))
    return [
        (draw(st.sampled_from(sorted(STEPS))), *(draw(st.integers(0, 30)) for _ in range(3)), draw(st.integers(-3, 4)))
        for _ in range(length)
    ]


def run_program(steps: list[tuple[str, int, int, int, int]], n: int, data: torch.Tensor) -> list[torch.Tensor]:
    pool = [torch.arange(n), torch.arange(n)[:, None], torch.arange(n)[None, :], torch.ones(n, dtype=torch.bool), data]
    for name, a, b, c, k in steps:
        pool.append(STEPS[name](pool[-1 - a % len(pool)], pool[-1 - b % len(pool)], pool[-1 - c % len(pool)], k, n))
    return pool[5:]


@settings(max_examples=120, deadline=None)
@given(programs())
def test_no_closed_form_is_ever_wrong(steps: list[tuple[str, int, int, int, int]]) -> None:
    gm = captured(lambda n, data: run_program(steps, n, data), torch.tensor([3, 0, 1, 4, 2]))
    values = analyse(gm.graph)
    for tokens in (2, 5, 7):
        data = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
        assert not wrong_elements(gm, values, tokens, data)


def _planted(name: str) -> tuple[str, Any]:
    if name == "le":
        wrong = ops._comparison(lambda a, b: p.ge(p.combine(p.combine(b, a, -1), p.ONE)), lambda a, b: a <= b)
    elif name == "slice":
        wrong = lambda call: call.tensor().expr  # noqa: E731
    elif name == "floor_divide":
        wrong = lambda call: call.operand("self")  # noqa: E731
    else:
        wrong = moves._triangle(False)
    return f"aten::{name}", wrong


@pytest.mark.parametrize(
    "name, step", [("le", "le"), ("slice", "every other"), ("floor_divide", "floor"), ("tril", "tril")]
)
def test_sabotage_a_wrong_transfer_function_is_seen(name: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algebra._HANDLERS, *_planted(name))
    found = []
    for a, b in itertools.product(range(4), repeat=2):
        gm = captured(
            lambda n, a=a, b=b: [*run_program([(step, a, b, 0, 1)], n, torch.arange(n)), torch.arange(2 * n)[::2]]
        )
        found += wrong_elements(gm, analyse(gm.graph), 7)
    assert found
