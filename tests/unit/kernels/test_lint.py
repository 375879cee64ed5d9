# SPDX-License-Identifier: Apache-2.0
"""Barriers between scratch accesses: shipped texts have them, and each one that they have is needed."""

from __future__ import annotations

import re

import pytest

from pcp_kernels import catalog
from pcp_kernels.generate import generate
from pcp_kernels.lint import missing_barriers
from pcp_kernels.specs import KernelSpec

pytestmark = pytest.mark.unit

SHIPPED = list(catalog.shipped().values())
BARRIER = "tl.debug_barrier()"
# Kernels that exchange candidates through memory; a text without a barrier proves nothing below.
WITH_SCRATCH = [spec for spec in SHIPPED if spec.family in {"topk", "split", "select", "merge"}]


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("spec", SHIPPED, ids=lambda spec: spec.name)
def test_shipped_texts_have_their_barriers(spec: KernelSpec, interpret: bool) -> None:
    assert missing_barriers(generate(spec, interpret)) == []


@pytest.mark.parametrize("spec", WITH_SCRATCH, ids=lambda spec: spec.name)
def test_removing_any_barrier_is_found(spec: KernelSpec) -> None:
    text = generate(spec)
    places = [match.start() for match in re.finditer(re.escape(BARRIER), text)]
    assert len(places) >= 2
    for place in places:
        spoiled = text[:place] + "pass" + text[place + len(BARRIER) :]
        assert missing_barriers(spoiled), f"not missed: the barrier in line {text[:place].count(chr(10)) + 1}"


def meta(scratch: tuple[str, ...]) -> str:
    return f"META = {{'signature': {{'held': '*i32', 'out': '*i32', 'n': 'i32'}}, 'scratch': {scratch!r}}}\n"


def linted(body: str, helpers: str = "", scratch: tuple[str, ...] = ("held",)) -> list[tuple[int, str, str]]:
    lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines())
    text = f"def kernel(held, out, n):\n{lines}\n{helpers}\n{meta(scratch)}"
    return [(finding.line, finding.pointer, finding.later) for finding in missing_barriers(text)]


def test_a_load_after_a_store() -> None:
    assert linted("tl.store(held, 1)\nx = tl.load(held)") == [(3, "held", "load")]
    assert linted(f"tl.store(held, 1)\n{BARRIER}\nx = tl.load(held)") == []


def test_a_store_after_a_load() -> None:
    assert linted("x = tl.load(held)\ntl.store(held, x)") == [(3, "held", "store")]
    assert linted(f"x = tl.load(held)\n{BARRIER}\ntl.store(held, x)") == []


def test_derived_pointers_are_followed_and_loaded_values_are_not() -> None:
    assert linted("own = held + 4\nmore = own + n\ntl.store(more, 1)\nx = tl.load(own)") == [(5, "held", "load")]
    assert linted("x = tl.load(held)\ntl.store(out + x, x)", scratch=()) == []
    assert linted("own = out\nown += held\ntl.store(own, 1)\nx = tl.load(held)") == [(5, "held", "load")]


def test_a_name_stands_for_what_it_may_be_on_any_path() -> None:
    body = "if n > 0:\n    own = held\nelse:\n    own = out\ntl.store(own, 1)\nx = tl.load(held)"
    assert (7, "held", "load") in linted(body)
    assert (6, "held", "load") in linted(
        "own = held\nfor i in range(n):\n    own = out\ntl.store(own, 1)\nx = tl.load(held)"
    )


def test_the_end_of_a_loop_meets_its_beginning() -> None:
    body = f"for i in range(n):\n    tl.store(held, i)\n    {BARRIER}\n    x = tl.load(held)"
    assert linted(body) == [(3, "held", "store")]
    assert linted(body + f"\n    {BARRIER}") == []
    assert linted(body.replace("for i in range(n)", "while n > 0")) == [(3, "held", "store")]


def test_a_barrier_on_one_branch_is_none_on_the_other() -> None:
    assert linted(f"tl.store(held, 1)\nif n > 0:\n    {BARRIER}\nx = tl.load(held)") == [(5, "held", "load")]
    assert linted(f"tl.store(held, 1)\nif n > 0:\n    {BARRIER}\nelse:\n    {BARRIER}\nx = tl.load(held)") == []
    # A loop may run no time at all.
    assert linted(f"tl.store(held, 1)\nfor i in range(n):\n    {BARRIER}\nx = tl.load(held)") == [(5, "held", "load")]


def test_helpers_are_walked_with_their_pointers() -> None:
    helper = "def put(place, value):\n    tl.store(place + 1, value)\n"
    assert linted("put(held + n, 1)\nx = tl.load(held)", helper) == [(3, "held", "load")]
    assert linted("put(value=1, place=held)\nx = tl.load(held)", helper) == [(3, "held", "load")]
    assert linted("put(out, 1)\nx = tl.load(held)", helper, scratch=()) == []


@pytest.mark.parametrize(
    "text, named",
    [
        ("META = {'scratch': []}", "no function `kernel`"),
        ("def kernel(a): pass", "no META"),
        ("def kernel(n): pass\n" + meta(("held",)), r"names held; arguments of kernel: n"),
        ("def kernel(held):\n    tl.atomic_add(held + 1, 2)\n" + meta(("held",)), "line 2: tl.atomic_add is not"),
        (f"def kernel(held):\n    tl.store(held, 1)\n    {BARRIER}\n    x = tl.load(held)\n" + meta(()),
         "names nothing; pointers that are loaded from and stored to: held"),
        ("def kernel(held):\n    tl.store(held, 1)\n" + meta(("held",)), "names held; .* stored to: none"),
    ],
)  # fmt: skip
def test_texts_of_another_making_are_refused(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        missing_barriers(text)
