# SPDX-License-Identifier: Apache-2.0
"""Mode 3 with vLLM's real split, each piece run as it is (``backend: eager``), with and without piecewise CUDA graphs:
vLLM's capture, dispatch and padding, replays checked on CPU instead of made on a card."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from pcp_passes.frontends.vllm.session import EngineFailed, Group, Request
from tests.models import prompt
from tests.vllm import graph_faults, looks, mtp_engines
from tests.vllm.cases import ragged
from tests.vllm.engines import PROBE, Engine, failure_of, reference, result_of
from tests.vllm.test_equality import TOLERANCE, difference

#: Captured sizes. The largest is below the token budget: some steps find no graph.
SIZES = [4, 8, 16, 24, 48]
#: Rows of one rank that have a compiled entry of their own, and a boundary between two ranges.
COMPILED, BOUNDARY = 20, 12
BODIES = {"backbone", "backbone_replicated"}
DRAFT_BODIES = {"eagle_head", "eagle_head_replicated"}


def _ask(*names: str, requests: tuple[Request, ...] = ()) -> Group:
    return Group(requests, tuple(graph_faults.qualified(name) for name in names))


def _alone(tokens: int) -> tuple[Request, ...]:
    return (Request(prompt(tokens, seed=60 + tokens), 3),)


_LOOK = {
    "pieces": Group(rpc=(looks.qualified("pieces"),)),
    "captured": _ask("captured"),
    "measured": _ask("measured", "count"),
}
_OFF = {
    "off": _ask("graphs_off", requests=ragged(seed=1).requests),
    # 39 tokens are 20 rows on the larger rank; as many tokens are 10 rows.
    "39 tokens": _ask("count_entries", requests=_alone(2 * COMPILED - 1)),
    "entries of 39 tokens": _ask("entries"),
    "20 tokens": _ask("count_entries", requests=_alone(COMPILED)),
    "entries of 20 tokens": _ask("entries", "graphs_on"),
}
_DENSE = {
    **_LOOK,
    **_OFF,
    "nothing_moved": _ask("nothing_moved"),
    "target_ids_moved": _ask("target_ids_moved"),
    "by rank": Group(_alone(19), (f"{PROBE}:start",)),
    "steps by rank": Group(rpc=(f"{PROBE}:stop",)),
    "by_global_count": Group(_alone(19), (graph_faults.qualified("by_global_count"), f"{PROBE}:start")),
    "steps by_global_count": Group(rpc=(f"{PROBE}:stop", graph_faults.qualified("undo"))),
}
_DRAFTS = {
    **_LOOK,
    "nothing_moved": _ask("nothing_moved"),
    "draft_states_moved": _ask("draft_states_moved"),
    "off": _ask("graphs_off", requests=mtp_engines.even()),
}

DENSE = Engine(
    "tiny_gqa",
    mode=3,
    backend="eager",
    options={"poison": True},
    budget=64,
    cases=("ragged", "prompt_logprobs", "shared_prefix", "waves", "sampled"),
    extra=tuple(_DENSE.values()),
    compilation={
        "cudagraph_mode": "PIECEWISE",
        "cudagraph_capture_sizes": SIZES,
        "compile_sizes": [COMPILED],
        "compile_ranges_endpoints": [BOUNDARY],
    },
    doomed=graph_faults.qualified("replicated_never_captured"),
)
#: Latent attention, whose captured sizes reach every step, and its draft module.
DRAFTS = replace(
    mtp_engines.stock("tiny_mla_mtp", 2),
    pcp=2,
    mode=3,
    backend="eager",
    options={"poison": True},
    extra=tuple(_DRAFTS.values()),
    compilation={"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [8, 16, 32, 64, 160, 304]},
)
_EXTRAS = {DENSE.model: list(_DENSE), DRAFTS.model: list(_DRAFTS)}


def _index(engine: Engine, name: str) -> int:
    extras = _EXTRAS[engine.model]
    return list(engine.groups()).index(f"extra {extras.index(name)}" if name in extras else name)


def _said(engine: Engine, name: str, rank: int = 0, function: int = 0) -> Any:
    """What a function of a group, the first if nothing is said, returned on a rank."""
    return result_of(engine).rpc[_index(engine, name)][function][rank]


@pytest.fixture(scope="module", autouse=True)
def _two_at_a_time() -> None:
    """Much of an engine's time goes by on one core: importing, compiling, waiting for the other rank. Threads must not
    be the first to import transformers."""
    engines = (DENSE, DRAFTS, reference("tiny_gqa"), mtp_engines.reference(DRAFTS))
    for engine in engines:
        engine.session()

    def start(engine: Engine) -> None:
        with suppress(EngineFailed):  # the tests say so
            result_of(engine)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(start, engines))


# -- answers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [*DENSE.cases, "off"])
def test_dense_equals_one_rank(case: str) -> None:
    other = reference("tiny_gqa")
    expected = result_of(other).outputs[list(other.groups()).index("ragged" if case == "off" else case)]
    equal, largest = difference(result_of(DENSE).outputs[_index(DENSE, case)], expected)
    assert equal
    assert largest <= TOLERANCE


@pytest.mark.parametrize("case", [*mtp_engines.CASES, "off"])
def test_drafts_equal_one_rank(case: str) -> None:
    """Tokens, logprobs, and of every step proposals and accepted counts."""
    other, name = mtp_engines.reference(DRAFTS), "extra 0" if case == "off" else case
    mine = list(DRAFTS.groups())[_index(DRAFTS, case)]
    expected = result_of(other).outputs[list(other.groups()).index(name)]
    equal, largest = difference(result_of(DRAFTS).outputs[_index(DRAFTS, case)], expected)
    assert equal
    assert largest <= TOLERANCE
    for what in ("accepted", "drafts"):
        steps = mtp_engines.steps_of(DRAFTS, mine, what)
        assert steps and steps == mtp_engines.steps_of(other, name, what)
        assert steps == mtp_engines.steps_of(DRAFTS, mine, what, rank=1)


# -- pieces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "bodies"), [(DENSE, BODIES), (DRAFTS, BODIES | DRAFT_BODIES)], ids=str)
def test_every_body_is_split_and_collectives_are_outside(engine: Engine, bodies: set[str]) -> None:
    pieces = _said(engine, "pieces")
    assert {piece["body"] for piece in pieces} == bodies
    ours = [piece for piece in pieces if piece["ours"]]
    assert all(piece["split"] for piece in ours)
    assert {piece["body"] for piece in ours} == {body for body in bodies if not body.endswith("_replicated")}


@pytest.mark.parametrize("engine", [DENSE, DRAFTS], ids=str)
def test_ranges_are_picked_by_the_rows_of_a_rank(engine: Engine) -> None:
    compiled = [piece for piece in _said(engine, "pieces") if not piece["split"]]
    assert len(compiled) >= 8
    for piece in compiled:
        assert piece["picked_by"], "vLLM would have nothing to pick by"
        assert {piece["picked_by"]} == set(piece["rows"]), "one symbol, and no multiple of it"


def _ran(name: str, body: str) -> set[tuple[str, int]]:
    found = _said(DENSE, f"entries of {name}")
    assert {e["body"] for e in found} == BODIES, "a prompt's step, then decode steps"
    return {(e["entry"], e["rows"]) for e in found if e["body"] == body}


def test_a_compiled_size_is_met_by_rows_of_a_rank() -> None:
    assert _ran("39 tokens", "backbone") == {(f"{COMPILED}..{COMPILED}", COMPILED)}
    # As many tokens as the compiled size, but not as many rows.
    assert _ran("20 tokens", "backbone") == {(f"1..{BOUNDARY}", COMPILED // 2)}
    assert _ran("39 tokens", "backbone_replicated") == {(f"1..{BOUNDARY}", 1)}


def test_every_piece_of_a_body_ran_its_entry() -> None:
    pieces = {p["body"]: 0 for p in _said(DENSE, "pieces")}
    for piece in _said(DENSE, "pieces"):
        pieces[piece["body"]] += not piece["split"]
    ran = {(e["body"], e["piece"]) for e in _said(DENSE, "entries of 39 tokens")}
    assert len(ran) == sum(pieces.values())


# -- graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("engine", "bodies"), [(DENSE, BODIES), (DRAFTS, BODIES | DRAFT_BODIES)], ids=str)
def test_both_bodies_are_captured_for_every_size_that_they_meet_and_replayed(engine: Engine, bodies: set[str]) -> None:
    found = _said(engine, "captured")
    every = engine.compilation["cudagraph_capture_sizes"]
    for body in bodies:
        # Steps that are replicated hold decoding requests only: 32 of them.
        most = min(engine.budget, 32 * (1 + engine.drafts)) if body.endswith("_replicated") else every[-1]
        sizes = {size for size in every if size <= next(enough for enough in every if enough >= most)}
        pieces = {p["piece"] for p in found if p["body"] == body}
        assert {(p["piece"], p["rows"]) for p in found if p["body"] == body} == {
            (piece, size) for piece in pieces for size in sizes
        }
        hits = {p["rows"]: p["hits"] for p in found if p["body"] == body and p["piece"] == 0}
        assert sum(count > 0 for count in hits.values()) >= 2, hits
        assert sum(hits.values()) > 10, hits
    assert _said(engine, "captured", rank=1) == found, "ranks replay the same graphs"


def test_what_is_captured_is_what_was_announced() -> None:
    for engine in (DENSE, DRAFTS):
        assert _said(engine, "measured", function=1) == len(_said(engine, "captured"))
    every = DRAFTS.compilation["cudagraph_capture_sizes"]
    assert {piece["kept"] for piece in _said(DRAFTS, "measured")} == {len(every), len(every) - 1}, "96 rows take 160"


@pytest.mark.parametrize("engine", [DENSE, DRAFTS], ids=str)
def test_what_vllm_measures_with_is_captured_and_dropped(engine: Engine) -> None:
    """With managers, plan and cache of their own, as on a card: what is replayed was captured after them."""
    pieces = _said(engine, "measured")
    assert pieces and all(piece["dropped"] == piece["kept"] > 0 for piece in pieces)


def _sizes_of_steps(name: str) -> list[tuple[int, int]]:
    """Rows of the fullest rank and padded rows of the steps of a group."""
    return [(max(s["rows_per_rank"]), s["padded_rows"]) for s in _said(DENSE, f"steps {name}")["steps"]]


def _smallest(rows: int) -> int:
    return min(size for size in SIZES if size >= rows)


def test_a_size_is_chosen_by_the_rows_of_a_rank() -> None:
    steps = _sizes_of_steps("by rank")
    assert steps[0] == (10, 16), "19 tokens on two ranks"
    assert all(padded == _smallest(rows) for rows, padded in steps)


def test_a_size_chosen_by_the_global_count_is_seen() -> None:
    steps = _sizes_of_steps("by_global_count")
    assert not all(padded == _smallest(rows) for rows, padded in steps)


# -- what the replay check sees ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", [DENSE, DRAFTS], ids=str)
def test_a_dummy_step_replays_what_real_steps_do(engine: Engine) -> None:
    assert _said(engine, "nothing_moved") == ""


@pytest.mark.parametrize(
    ("engine", "fault", "piece"),
    [(DENSE, "target_ids_moved", "piece 0 of backbone "), (DRAFTS, "draft_states_moved", "piece 0 of eagle_head ")],
    ids=str,
)
def test_a_moved_input_is_refused(engine: Engine, fault: str, piece: str) -> None:
    for rank in (0, 1):
        said = _said(engine, fault, rank)
        assert said.startswith(piece + "was captured with ") and "is replayed with" in said


def test_a_body_that_was_not_captured_ends_the_engine_at_its_first_step() -> None:
    assert "the replicated body of the target has no captured CUDA graph of " in str(failure_of(DENSE))
