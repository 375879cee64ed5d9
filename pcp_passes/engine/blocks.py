# SPDX-License-Identifier: Apache-2.0
"""Blocks of the paged KV cache: who holds them, which may be reused for an equal prefix, which is evicted next.

Target and drafter share block ids, each with cache tensors of its own. A full block is found again by a *key*, a hash
over the tokens from the start of the request to the end of the block. The drafter's row of position ``t`` is made from
token ``t + 1``, so with a drafter the key also covers the token *after* the block: a block whose own tokens match but
whose successor differs is not a hit, and is computed again. ::

    block size 4, drafter, prompt  a b c d | e f g h | i
    key of block 0 covers          a b c d   e
    key of block 1 covers          a b c d   e f g h   i
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

Key = bytes


def block_keys(tokens: Sequence[int], block_size: int, *, next_token: bool, known: Sequence[Key] = ()) -> Iterator[Key]:
    """Keys of the full blocks of ``tokens``, after the ``known`` ones; ``next_token``: each needs its successor too."""
    parent = known[-1] if known else b""
    for start in range(len(known) * block_size, len(tokens) - block_size + 1, block_size):
        end = start + block_size + next_token
        if end > len(tokens):
            return
        parent = hashlib.sha256(parent + array("q", tokens[start:end]).tobytes()).digest()
        yield parent


class BlockPool:
    """``num_blocks`` blocks with reference counts. A block nobody holds keeps its key until it is handed out again.

    Free blocks are handed out least recently released first; a request's tail before its head, because a prefix is
    worth more than what follows it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._key_of: dict[int, Key] = {}
        self._by_key: dict[Key, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._free)

    def find(self, keys: Iterator[Key]) -> tuple[list[int], list[Key]]:
        """Blocks of the longest known chain of ``keys``, and its keys. Takes no reference."""
        blocks, found = [], []
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                break
            blocks.append(block)
            found.append(key)
        return blocks, found

    def take(self, count: int, shared: Sequence[int] = ()) -> list[int] | None:
        """One more reference to each of ``shared``, and ``count`` fresh blocks; None, and nothing taken, if too few."""
        idle = sum(self._references[block] == 0 for block in shared)
        if count > len(self._free) - idle:
            return None
        for block in shared:
            self._references[block] += 1
            self._free.pop(block, None)
        fresh = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in fresh:
            self._references[block] = 1
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._by_key[key]
        return fresh

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block of a request, in the request's order."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released but nobody holds it"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None

    def register(self, block: int, key: Key) -> None:
        """``block`` now holds the rows of ``key``. The first block with a key keeps it."""
        assert self._references[block] > 0, f"block {block} is registered but nobody holds it"
        if key not in self._by_key and block not in self._key_of:
            self._by_key[key] = block
            self._key_of[block] = key
