# SPDX-License-Identifier: Apache-2.0
"""Mode 3: what vLLM's split made of our bodies, and its compile cache across starts."""

from __future__ import annotations

from tests.vllm.engines import CHANGED, COLD, FULL, PIECEWISE, WARM, reference, result_of
from tests.vllm.test_equality import TOLERANCE, difference


def pieces() -> list[dict[str, object]]:
    return result_of(PIECEWISE).rpc[-1][0][0]


def test_both_bodies_are_split() -> None:
    assert {str(piece["body"]) for piece in pieces()} == {"backbone", "backbone_replicated"}


def test_collectives_are_outside_compiled_pieces() -> None:
    ours = [piece for piece in pieces() if piece["ours"]]
    assert len(ours) == 4, "one gather for each of four layers, in the sharded body alone"
    assert all(piece["split"] and piece["body"] == "backbone" for piece in ours)


def test_no_compiled_piece_sees_gathered_rows() -> None:
    """vLLM picks a piece's compiled range by the first size among its inputs: P*M there would be the wrong one."""
    compiled = [piece for piece in pieces() if not piece["split"]]
    assert len(compiled) >= 8
    symbols = {row for piece in compiled for row in piece["rows"]}
    assert symbols, "compiled pieces take rows"
    assert not [symbol for symbol in symbols if "*" in symbol]
    gathered = [piece for piece in pieces() if piece["split"] and any("*" in row for row in piece["rows"])]
    assert gathered, "the check above can see a product of P and M"


def _counts(engine: object) -> dict[str, int]:
    # The first question that an engine of this module is asked.
    return next(reply for reply in result_of(engine).rpc if reply)[0][0]  # type: ignore[arg-type]


def test_a_warm_start_compiles_nothing_and_is_still_sharded() -> None:
    cold, warm = _counts(COLD), _counts(WARM)
    assert cold["num_compiled_artifacts_saved"] > 0
    assert warm["num_compiled_artifacts_saved"] == 0
    assert warm["num_compiled_artifacts_loaded"] == cold["num_compiled_artifacts_saved"]
    tokens, largest = difference(result_of(WARM).outputs[0], result_of(reference("tiny_gqa")).outputs[0])
    assert tokens
    assert largest <= TOLERANCE


if FULL:  # a further start

    def test_a_changed_option_misses_the_cache() -> None:
        assert _counts(CHANGED)["num_compiled_artifacts_saved"] == _counts(COLD)["num_compiled_artifacts_saved"]
