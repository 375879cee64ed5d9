# SPDX-License-Identifier: Apache-2.0
"""vLLM's own PCP, which serves MLA models only, as a live oracle."""

from __future__ import annotations

from tests.vllm.engines import Engine, reference, result_of

#: Stock vLLM with its own batch manager and its own gathers; no compilation.
NATIVE_MLA = Engine("tiny_mla", mode=0, options=None, prefix_caching=False)


def test_native_pcp_runs_here() -> None:
    """The oracle itself agrees with one rank, so that a disagreement points at us."""
    native, one = result_of(NATIVE_MLA), result_of(reference("tiny_mla"))
    for found, wanted in zip(native.outputs, one.outputs, strict=True):
        assert [o and o.tokens for o in found] == [o and o.tokens for o in wanted]
