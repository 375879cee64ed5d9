# SPDX-License-Identifier: Apache-2.0
"""Values of ``pcp::attend`` against the explicit mask, and that the comparison can fail.

Measured in float64: at most 1e-14 clean, 6e-4 or more under each sabotage below.
"""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pcp_passes.attention import attend, attend_reference, blocks, parts, tiles

CLEAN = 1e-11
BROKEN = 1e-4


@dataclass(frozen=True)
class Case:
    positions: tuple[int, ...]
    keys: int = 600
    left: int = -1
    right: int = 0
    chunk: int = 0
    sinks: bool = False
    slopes: bool = False
    softcap: float = 0.0
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    value_size: int = 16
    batch: int = 1
    dtype: torch.dtype = torch.float64
    seed: int = 0


def operands(case: Case) -> tuple[list[torch.Tensor], dict[str, Any]]:
    rng = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64).to(case.dtype)

    q = normal(case.batch, case.heads, len(case.positions), case.size)
    k = normal(case.batch, case.kv_heads, case.keys, case.size)
    v = normal(case.batch, case.kv_heads, case.keys, case.value_size)
    options: dict[str, Any] = {"left": case.left, "right": case.right, "chunk": case.chunk, "softcap": case.softcap}
    options["sinks"] = normal(case.heads) + 2 if case.sinks else None
    options["slopes"] = 0.5 ** torch.arange(1, case.heads + 1).to(case.dtype) if case.slopes else None
    # Larger than usual, so that the softmax is far from a plain average.
    options["scale"] = 2 * case.size**-0.5
    return [q, k, v, torch.tensor(case.positions, dtype=torch.int64)], options


def error(case: Case) -> float:
    tensors, options = operands(case)
    found, expected = attend(*tensors, **options), attend_reference(*tensors, **options)
    assert found.dtype == expected.dtype == case.dtype
    assert found.shape == expected.shape
    assert not found.isnan().any()
    return (found.double() - expected.double()).abs().max().item()


ZIGZAG = (*range(64, 128), *range(448, 512), 0, 0, 0)
NAMED = {
    "zigzag with padding": Case(ZIGZAG),
    "first and last chunk": Case((*range(150), *range(450, 600))),
    "all rows": Case(tuple(range(600))),
    "interleave": Case(tuple(range(1, 600, 4))),
    "single row": Case((599,)),
    "single row, single key": Case((0,), keys=1),
    "position 0 alone": Case((0,)),
    "empty prefix": Case(tuple(range(40))),
    "all padding": Case((0, 0)),
    "scattered": Case((599, 3, 4, 5, 300, 0, 0, 7, 6)),
    "narrow window": Case(ZIGZAG, left=9),
    "window of one": Case(ZIGZAG, left=0),
    "wide window": Case(tuple(range(600)), left=299),
    "window larger than the keys": Case(ZIGZAG, left=5000),
    "encoder": Case(ZIGZAG, right=-1),
    "encoder window": Case(ZIGZAG, left=33, right=20),
    "look ahead only": Case(ZIGZAG, left=0, right=-1),
    "chunks": Case(ZIGZAG, chunk=50),
    "chunk of one": Case(ZIGZAG, chunk=1),
    "chunks with a window": Case(ZIGZAG, chunk=100, left=20),
    "sinks": Case(ZIGZAG, sinks=True),
    "sinks with a window": Case(ZIGZAG, sinks=True, left=40),
    "alibi": Case(ZIGZAG, slopes=True),
    "alibi, all rows": Case(tuple(range(600)), slopes=True),
    "alibi with sinks": Case(ZIGZAG, slopes=True, sinks=True),
    "alibi with a window": Case(tuple(range(600)), slopes=True, left=300),
    "softcap": Case(ZIGZAG, softcap=1.5),
    "softcap, window, sinks, alibi": Case(ZIGZAG, softcap=1.5, left=200, sinks=True, slopes=True),
    "softcap over many keys": Case((*range(5), *range(4900, 4960)), keys=5000, softcap=1.5),
    "one key head": Case(ZIGZAG, kv_heads=1),
    "no grouped heads": Case(ZIGZAG, kv_heads=4),
    "odd head size": Case(ZIGZAG, size=7, value_size=7),
    "MLA heads": Case(ZIGZAG, size=24, value_size=16),
    "wider values": Case(ZIGZAG, size=8, value_size=24),
    "MLA heads with softcap": Case(ZIGZAG, size=24, value_size=16, softcap=2.0),
    "batch": Case(ZIGZAG, batch=3),
    "batch, window, sinks": Case(ZIGZAG, batch=2, left=150, sinks=True),
}


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED.keys())
def test_named_cases(case: Case) -> None:
    assert error(case) < CLEAN


@pytest.mark.parametrize(
    "dtype, bound",
    [
        # Worst of the cases below: 1.4e-6, 1.6e-2 (one unit in the last place of an output near 2 to 4), 2e-3.
        (torch.float32, 1e-5),
        (torch.bfloat16, 3.2e-2),
        (torch.float16, 4e-3),
    ],
)
@pytest.mark.parametrize("name", ["zigzag with padding", "alibi with sinks", "wide window", "softcap", "MLA heads"])
def test_dtypes(name: str, dtype: torch.dtype, bound: float) -> None:
    assert error(replace(NAMED[name], dtype=dtype)) < bound


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_random_cases(data: st.DataObject) -> None:
    keys = data.draw(st.sampled_from([1, 2, 17, 130, 700]), label="keys")
    runs = data.draw(
        st.lists(st.tuples(st.integers(0, keys - 1), st.integers(1, 200), st.integers(0, 3)), min_size=1, max_size=4),
        label="runs of (start, rows, step)",
    )
    positions = tuple(start + i * step for start, count, step in runs for i in range(count) if start + i * step < keys)
    kv_heads = data.draw(st.sampled_from([1, 2, 4]))
    case = Case(
        positions,
        keys=keys,
        left=data.draw(st.sampled_from([-1, -1, 0, 1, 30, 200])),
        right=data.draw(st.sampled_from([0, 0, -1, 1, 30, 200])),
        chunk=data.draw(st.sampled_from([0, 0, 1, 24, 128])),
        sinks=data.draw(st.booleans()),
        slopes=data.draw(st.booleans()),
        softcap=data.draw(st.sampled_from([0.0, 0.0, 1.0, 30.0])),
        kv_heads=kv_heads,
        size=data.draw(st.sampled_from([4, 8])),
        value_size=data.draw(st.sampled_from([4, 8])),
        batch=data.draw(st.integers(1, 2)),
        seed=data.draw(st.integers(0, 9)),
    )
    assert error(case) < CLEAN


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_keys_that_no_row_sees_do_not_matter(softcap: float) -> None:
    case = Case((*range(100, 140), *range(300, 340)), left=19, softcap=softcap)
    (q, k, v, positions), options = operands(case)
    clean = attend(q, k, v, positions, **options)
    seen = torch.zeros(case.keys, dtype=torch.bool)
    seen[81:140] = seen[281:340] = True
    k[:, :, ~seen], v[:, :, ~seen] = float("nan"), float("inf")
    assert torch.equal(attend(q, k, v, positions, **options), clean)
    k[:, :, 320] = float("nan")
    assert attend(q, k, v, positions, **options).isnan().any()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_row_without_a_key_is_zero(softcap: float, sinks: bool) -> None:
    case = Case((3, 4, 20, 21, 5), keys=8, left=2, softcap=softcap, sinks=sinks)
    (q, k, v, positions), options = operands(case)
    out = attend(q, k, v, positions, **options)
    assert torch.equal(out[:, :, 2:4], torch.zeros_like(out[:, :, 2:4]))
    assert error(case) < CLEAN


def test_rows_depend_on_their_position_alone() -> None:
    """Repeated and reordered rows: what a padded row computes is what the row it repeats computes."""
    (q, k, v, positions), options = operands(Case((*range(40), *range(300, 340))))
    order = torch.tensor([*range(79, -1, -1), 5, 5, 70])
    whole = attend(q, k, v, positions, **options)
    picked = attend(q[:, :, order], k, v, positions[order], **options)
    torch.testing.assert_close(picked, whole[:, :, order], rtol=0, atol=CLEAN)


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_operands_of_any_strides(softcap: float) -> None:
    (q, k, v, positions), options = operands(Case(ZIGZAG, batch=2, softcap=softcap))
    expected = attend(q, k, v, positions, **options)

    def columns_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    def rows_first(x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    for change in (columns_first, rows_first):
        strided = attend(change(q), change(k), change(v), positions, **options)
        torch.testing.assert_close(strided, expected, rtol=0, atol=CLEAN)
    shared = k[:, :1].expand(-1, 2, -1, -1)
    torch.testing.assert_close(
        attend(q, shared, v, positions, **options),
        attend(q, shared.clone(), v, positions, **options),
        rtol=0,
        atol=CLEAN,
    )


def average(first: parts.Result, second: parts.Result) -> parts.Result:
    return (first[0] + second[0]) / 2, torch.logaddexp(first[1], second[1])


def wider(change: dict[str, int]) -> Any:
    """A plan with one of its arguments off by one."""

    def plan(
        positions: torch.Tensor, keys: int, left: int, right: int, chunk: int, rows: int
    ) -> tuple[tiles.Tile, ...]:
        values = {"left": left, "right": right, "chunk": chunk}
        values = {name: value + change.get(name, 0) for name, value in values.items()}
        return tiles.plan(positions + change.get("positions", 0), keys, **values, rows=rows)

    return plan


def not_causal(q, k, v, scale, causal, bias):  # type: ignore[no-untyped-def]
    return parts.flash_part(q, k, v, scale, False, bias)


SABOTAGE = {
    "merge without lse": (Case(ZIGZAG), (blocks, "merge", average)),
    "merge without lse, explicit": (NAMED["softcap over many keys"], (parts, "merge", average)),
    "window one wider": (Case(ZIGZAG, left=9), (blocks, "plan", wider({"left": 1}))),
    "window one narrower": (Case(ZIGZAG, left=9), (blocks, "plan", wider({"left": -1}))),
    "sees the next key": (Case(ZIGZAG), (blocks, "plan", wider({"right": 1}))),
    "chunk one longer": (Case(ZIGZAG, chunk=50), (blocks, "plan", wider({"chunk": 1}))),
    "positions one off": (Case(ZIGZAG, left=9), (blocks, "plan", wider({"positions": 1}))),
    "diagonal not causal": (Case(ZIGZAG), (blocks, "flash_part", not_causal)),
    "blind rows kept": (
        NAMED["wide window"],
        (tiles.Tile, "blind", lambda tile, part: torch.zeros_like(tile.low, dtype=torch.bool)),
    ),
    "masks forgotten": (
        Case(ZIGZAG, left=9),
        (tiles.Tile, "seen", lambda tile, part: torch.ones(len(tile.low), part.stop - part.start, dtype=torch.bool)),
    ),
    "sinks forgotten": (NAMED["sinks"], (torch, "sigmoid", torch.ones_like)),
}


@pytest.mark.parametrize("case, patch", SABOTAGE.values(), ids=SABOTAGE.keys())
def test_sabotage_is_seen(case: Case, patch: tuple[Any, str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert error(case) < CLEAN
    monkeypatch.setattr(*patch)
    assert error(case) > BROKEN


@pytest.mark.parametrize("option", ["sinks", "slopes", "softcap"])
def test_an_ignored_option_is_seen(option: str) -> None:
    case = replace(Case(ZIGZAG), **{option: 1.5 if option == "softcap" else True})
    tensors, options = operands(case)
    ignored = attend(*tensors, **{**options, option: 0.0 if option == "softcap" else None})
    assert (ignored - attend_reference(*tensors, **options)).abs().max() > BROKEN
