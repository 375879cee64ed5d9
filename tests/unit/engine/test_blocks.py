# SPDX-License-Identifier: Apache-2.0
"""Blocks are found by their tokens, evicted oldest first, and never handed out while somebody holds them."""

from __future__ import annotations

import random

import pytest

from pcp_passes.engine.blocks import BlockPool, block_keys


def keys(tokens: list[int], *, next_token: bool) -> list[bytes]:
    return list(block_keys(tokens, 4, next_token=next_token))


def test_a_key_covers_everything_before_and_with_a_drafter_the_next_token() -> None:
    a, b, c = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 0], [1, 2, 3, 0, 5, 6, 7, 8, 9]
    assert keys(a, next_token=False) == keys(b, next_token=False)
    assert keys(a, next_token=True)[0] == keys(b, next_token=True)[0]
    assert keys(a, next_token=True)[1] != keys(b, next_token=True)[1]
    assert not set(keys(a, next_token=False)) & set(keys(c, next_token=False))


def test_a_block_without_its_next_token_has_no_key_yet() -> None:
    assert len(keys(list(range(8)), next_token=False)) == 2
    assert len(keys(list(range(8)), next_token=True)) == 1


def test_known_keys_are_continued() -> None:
    tokens = list(range(17))
    every = keys(tokens, next_token=True)
    assert list(block_keys(tokens, 4, next_token=True, known=every[:2])) == every[2:]


def test_sharing_needs_no_fresh_block_and_counts_holders() -> None:
    pool = BlockPool(3)
    first = pool.take(2)
    assert first == [0, 1]
    pool.register(0, b"a")
    pool.release(first)
    assert pool.num_free == 3
    blocks, found = pool.find(iter([b"a", b"b"]))
    assert (blocks, found) == ([0], [b"a"])
    assert pool.take(3, blocks) is None, "the shared block cannot also be handed out"
    assert pool.num_free == 3, "nothing was taken"
    assert pool.take(2, blocks) == [2, 1]
    assert pool.take(0, blocks) == []
    pool.release([0])
    assert pool.take(1) is None, "one holder is left"


def test_the_least_recently_released_block_is_evicted_and_a_tail_before_its_head() -> None:
    pool = BlockPool(4)
    old, new = pool.take(2), pool.take(2)
    assert old is not None and new is not None
    for block, key in zip([*old, *new], [b"o0", b"o1", b"n0", b"n1"], strict=True):
        pool.register(block, key)
    pool.release(old)
    pool.release(new)
    assert pool.take(1) == [old[1]]
    assert pool.find(iter([b"o0"]))[0] == [old[0]]
    assert pool.find(iter([b"o1"]))[0] == []
    assert pool.take(2) == [old[0], new[1]]


def test_releasing_what_nobody_holds_is_a_bug() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.release([0])


def test_random_use_never_gives_a_block_twice() -> None:
    rng, pool = random.Random(3), BlockPool(12)
    held: list[list[int]] = []
    for step in range(2000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            shared = pool.find(iter([b"%d" % rng.randrange(20)]))[0]
            fresh = pool.take(rng.randrange(4), shared)
            if fresh is not None:
                others = {block for blocks in held for block in blocks}
                assert not others & set(fresh)
                held.append(shared + fresh)
                for block in fresh:
                    pool.register(block, b"%d" % rng.randrange(20))
        distinct = {block for blocks in held for block in blocks}
        assert pool.num_free == 12 - len(distinct), step
