# SPDX-License-Identifier: Apache-2.0
"""Which mask requests become patterns, and that a pattern is the mask transformers would have built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import masking_utils

from pcp_passes.frontends.transformers import MaskPattern, one_sequence_per_row, pcp_mask

W, CHUNK = 5, 4
CONFIG = SimpleNamespace(sliding_window=W, attention_chunk_size=CHUNK)

CAUSAL: dict[str, Any] = {"mask_function": masking_utils.causal_mask_function}
SLIDING: dict[str, Any] = {
    "mask_function": masking_utils.sliding_window_causal_mask_function(W),
    "local_size": W,
    "config": CONFIG,
}
CHUNKED: dict[str, Any] = {
    "mask_function": masking_utils.chunked_causal_mask_function(CHUNK, torch.zeros(2, dtype=torch.int64)),
    "local_size": CHUNK,
    "config": CONFIG,
}
BOTH_WAYS: dict[str, Any] = {
    "mask_function": masking_utils.bidirectional_mask_function,
    "allow_is_causal_skip": False,
    "allow_is_bidirectional_skip": True,
}
WINDOW_BOTH_WAYS: dict[str, Any] = {
    **BOTH_WAYS,
    "mask_function": masking_utils.sliding_window_bidirectional_mask_function(W),
    "local_size": W,
    "config": CONFIG,
}
KINDS = {
    "causal": CAUSAL,
    "sliding": SLIDING,
    "chunked": CHUNKED,
    "bidirectional": BOTH_WAYS,
    "bidirectional window": WINDOW_BOTH_WAYS,
}


def tensor_of(request: dict[str, Any], **sizes: Any) -> torch.Tensor:
    """transformers' own mask for a request, never skipped."""
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: torch.Tensor = masking_utils.sdpa_mask(**{**request, **sizes, **skips})
    return mask


@pytest.mark.parametrize("offsets", [(0, 0, 11), (7, 0, 18), (7, 0, 30), (9, 4, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_pattern_is_the_mask(kind: str, offsets: tuple[int, int, int]) -> None:
    q_offset, kv_offset, kv_length = offsets
    sizes = {"batch_size": 2, "q_length": 11, "kv_length": kv_length, "q_offset": q_offset, "kv_offset": kv_offset}
    found = pcp_mask(**KINDS[kind], **sizes)
    required = tensor_of(KINDS[kind], **sizes)
    if kind == "chunked" and kv_offset:
        assert isinstance(found, torch.Tensor)
        assert torch.equal(found, required)
        return
    assert isinstance(found, MaskPattern)
    assert torch.equal(found.dense(torch.device("cpu")).expand_as(required), required)


def test_a_wrong_pattern_is_another_mask() -> None:
    sizes = {"batch_size": 1, "q_length": 11, "kv_length": 11}
    pattern = MaskPattern(11, 11, 0, left=W, right=0)
    assert not torch.equal(pattern.dense(torch.device("cpu")), tensor_of(SLIDING, **sizes))


def test_offset_of_a_static_cache_is_a_tensor() -> None:
    pattern = pcp_mask(batch_size=1, q_length=3, kv_length=16, q_offset=torch.tensor(5), **CAUSAL)
    assert isinstance(pattern, MaskPattern)
    assert pattern.positions(torch.device("cpu")).tolist() == [5, 6, 7]


PACKED = masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 6 + [1] * 5] * 2))
OVERLAID = masking_utils.and_masks(CAUSAL["mask_function"], PACKED)
PADDING = torch.tensor([[False] * 3 + [True] * 8, [True] * 11])


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (kind, {"attention_mask": PADDING})
        for kind in KINDS
    ]
    + [
        # What transformers does for an overlay: it forbids the skip.
        ("causal", {"mask_function": OVERLAID, "allow_is_causal_skip": False}),
        ("causal", {"allow_is_causal_skip": False}),
        ("sliding", {"allow_is_causal_skip": False}),
        ("bidirectional", {"allow_is_bidirectional_skip": False}),
        # Another function although the skip is allowed, as someone who calls the interface by hand may pass it.
        ("causal", {"mask_function": OVERLAID}),
        # Nothing tells windows and chunks of one size apart.
        ("sliding", {"config": SimpleNamespace(sliding_window=W, attention_chunk_size=W)}),
        ("sliding", {"config": SimpleNamespace()}),
        ("chunked", {"config": SimpleNamespace(sliding_window=W)}),
    ],
)  # fmt: skip
def test_everything_else_is_what_sdpa_gets(kind: str, more: dict[str, Any]) -> None:
    request = {**KINDS[kind], **more, "batch_size": 2, "q_length": 11, "kv_length": 11}
    found, required = pcp_mask(**request), masking_utils.sdpa_mask(**request)
    assert not isinstance(found, MaskPattern)
    assert (found is None and required is None) or torch.equal(found, required)


def test_local_size_of_a_full_mask_is_no_window() -> None:
    found = pcp_mask(**{**BOTH_WAYS, "local_size": W, "config": CONFIG}, batch_size=1, q_length=9, kv_length=9)
    assert isinstance(found, MaskPattern)
    assert (found.left, found.right) == (-1, -1)


def test_an_attention_mask_of_ones_is_no_padding() -> None:
    sizes = {"batch_size": 2, "q_length": 11, "kv_length": 11}
    assert isinstance(pcp_mask(**CAUSAL, **sizes, attention_mask=torch.ones(2, 11, dtype=torch.bool)), MaskPattern)
    # A mask shorter than the keys hides the rest, as in a static cache.
    short = pcp_mask(**CAUSAL, **sizes, attention_mask=torch.ones(2, 9, dtype=torch.bool))
    assert not isinstance(short, MaskPattern)


def test_one_sequence_per_row() -> None:
    assert one_sequence_per_row(torch.arange(4, 9)[None])
    assert not one_sequence_per_row(torch.tensor([[0, 1, 2, 0, 1]]))
    assert not one_sequence_per_row(torch.stack([torch.arange(5), torch.zeros(5, dtype=torch.int64)]))
