# SPDX-License-Identifier: Apache-2.0
"""Request traces: read from files in two public formats, or made up with the statistics of one."""

from __future__ import annotations

import csv
import datetime
import json
import random
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512
"""Tokens of a block of the Mooncake format."""


@dataclass(frozen=True)
class Arrival:
    """A request. ``blocks``: ids of its prompt's blocks of 512 tokens; equal leading ids are a shared prefix."""

    seconds: float
    prompt: int
    output: int
    blocks: tuple[int, ...] = ()


def read(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first ``limit`` requests of a Mooncake-format ``.jsonl`` or an Azure-format ``.csv``, by time."""
    arrivals = []
    with path.open(newline="") as file:
        if path.suffix == ".jsonl":
            for line in file:
                row = json.loads(line)
                blocks = tuple(row.get("hash_ids", ()))
                seconds = row["timestamp"] / 1000
                arrivals.append(Arrival(seconds, int(row["input_length"]), int(row["output_length"]), blocks))
        elif path.suffix == ".csv":
            for row in csv.DictReader(file):
                # Seven digits of a second, of which datetime takes six.
                when = datetime.datetime.fromisoformat(row["TIMESTAMP"].strip()[:26].ljust(26, "0"))
                seconds = when.replace(tzinfo=datetime.timezone.utc).timestamp()
                arrivals.append(Arrival(seconds, int(row["ContextTokens"]), int(row["GeneratedTokens"])))
        else:
            raise ValueError(f"{path.name}: a trace is a .jsonl of Mooncake's format or a .csv of Azure's.")
    arrivals = [one for one in arrivals if one.prompt > 0]
    return sorted(arrivals, key=lambda one: one.seconds)[:limit]


def generate(count: int, seed: int = 0) -> list[Arrival]:
    """Requests like those of Mooncake's conversations, for machines without the files.

    Prompts are log-normal with a median of 6,909 and a 99th percentile of 85,401 tokens, outputs with a median of 350;
    arrivals are 3.4 a second. Half of the requests go on from an earlier one, and one in ten of those adds less than
    two blocks, which is where short and uneven chunks come from.
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    now, fresh = 0.0, 0
    for _ in range(count):
        now += rng.expovariate(3.4)
        prompt = max(1, round(rng.lognormvariate(8.84, 1.08)))
        kept: tuple[int, ...] = ()
        if arrivals and rng.random() < 0.5:
            kept = rng.choice(arrivals[-200:]).blocks
            short = rng.random() < 0.1
            prompt = len(kept) * BLOCK + (rng.randint(1, 2 * BLOCK) if short else max(1, prompt // 3))
        missing = -(-prompt // BLOCK) - len(kept)
        blocks = kept + tuple(range(fresh, fresh + missing))
        fresh += missing
        arrivals.append(Arrival(now, prompt, max(1, round(rng.lognormvariate(5.86, 0.6))), blocks))
    return arrivals


def computed_tokens(arrivals: list[Arrival]) -> list[int]:
    """Tokens of each prompt that no earlier prompt's blocks hold, at least one: a cache that forgets nothing.

    That leaves the shortest chunks that a cache can leave.
    """
    seen: set[int] = set()
    found = []
    for one in arrivals:
        shared = 0
        while shared < len(one.blocks) and one.blocks[shared] in seen:
            shared += 1
        seen.update(one.blocks)
        found.append(max(1, one.prompt - shared * BLOCK))
    return found
