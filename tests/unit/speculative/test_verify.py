# SPDX-License-Identifier: Apache-2.0
"""Verification against a loop over requests and drafts written from the papers; ragged counts; no host sync."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from pcp_passes.errors import ConfigError
from pcp_passes.speculative import ACCEPT, RESIDUAL, SAMPLE, sample, uniforms, verify

# The package exports the function under the name of its module.
verify_module = importlib.import_module("pcp_passes.speculative.verify")


@dataclass(frozen=True)
class Case:
    """Operands of ``verify``; ``drafts`` holds how many each request verifies."""

    logits: torch.Tensor
    drafts: tuple[int, ...]
    draft_ids: torch.Tensor
    draft_logits: torch.Tensor | None
    temperature: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    @property
    def cu_logits(self) -> torch.Tensor:
        return torch.tensor([0, *(1 + d for d in self.drafts)]).cumsum(0)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return verify(
            self.logits, self.cu_logits, self.draft_ids, self.draft_logits,
            self.temperature, self.seeds, self.positions,
        )  # fmt: skip

    def request(self, r: int) -> Case:
        """The same request alone in its batch."""
        rows = slice(int(self.cu_logits[r]), int(self.cu_logits[r + 1]))
        one = slice(r, r + 1)
        return Case(
            self.logits[rows], self.drafts[one], self.draft_ids[one],
            None if self.draft_logits is None else self.draft_logits[one],
            self.temperature[one], self.seeds[one], self.positions[rows],
        )  # fmt: skip


def make(seed: int, drafts: tuple[int, ...], steps: int, vocab: int, *, drawn: bool, levels: int = 3) -> Case:
    """Logits of few levels, so that there are ties; some drafts are the likeliest token and some are invalid."""
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int, low: int = 0, high: int = 4) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    requests, rows = len(drafts), sum(drafts) + len(drafts)
    logits = integers(rows, vocab, high=levels).float()
    draft_ids = integers(requests, steps, low=-1, high=vocab + 1)
    starts = torch.tensor([0, *(1 + d for d in drafts)]).cumsum(0)
    for r, count in enumerate(drafts):
        for j in range(count):
            if int(integers(1)) > 0:
                draft_ids[r, j] = logits[starts[r] + j].argmax()
    return Case(
        logits,
        drafts,
        draft_ids,
        integers(requests, steps, vocab, high=levels).float() if drawn else None,
        torch.tensor([0.0, 0.4, 1.0, 2.0])[integers(requests)],
        integers(requests, high=2**40),
        integers(rows, high=2**20),
    )


def oracle(case: Case) -> tuple[list[list[int]], list[int]]:
    """One request and one draft at a time, in Python floats."""
    vocab, steps = case.logits.shape[1], case.draft_ids.shape[1]

    def distribution(logits: list[float], temperature: float) -> list[float]:
        weights = [math.exp((x - max(logits)) / temperature) for x in logits]
        return [w / sum(weights) for w in weights]

    def number(r: int, row: int, purpose: int, columns: int) -> list[float]:
        return uniforms(case.seeds[r : r + 1], case.positions[row : row + 1], purpose, columns)[0].tolist()

    def pick(weights: list[float], noise: list[float]) -> int:
        scores = [
            math.log(w) - math.log(-math.log(u)) if w > 0 else -math.inf for w, u in zip(weights, noise, strict=True)
        ]
        return scores.index(max(scores))

    sampled, accepted, row = [], [], 0
    for r, count in enumerate(case.drafts):
        temperature, tokens = float(case.temperature[r]), []
        for j in range(count + 1):
            logits = case.logits[row + j].tolist()
            draft = int(case.draft_ids[r, j]) if j < count else -1
            valid = 0 <= draft < vocab
            if temperature == 0:
                tokens.append(logits.index(max(logits)))
                if tokens[-1] != draft:
                    break
                continue
            p = distribution(logits, temperature)
            if not valid:
                tokens.append(pick(p, number(r, row + j, SAMPLE, vocab)))
                break
            if case.draft_logits is None:
                q = [float(token == draft) for token in range(vocab)]
            else:
                q = distribution(case.draft_logits[r, j].tolist(), temperature)
            if number(r, row + j, ACCEPT, 1)[0] < p[draft] / q[draft]:
                tokens.append(draft)
                continue
            residual = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
            tokens.append(pick(residual, number(r, row + j, RESIDUAL, vocab)))
            break
        row += count + 1
        accepted.append(len(tokens) - 1)
        sampled.append(tokens + [-1] * (steps + 1 - len(tokens)))
    return sampled, accepted


CASES = st.builds(
    make,
    st.integers(0, 2**31),
    st.lists(st.integers(0, 4), min_size=1, max_size=6).map(tuple),
    st.just(4),
    st.sampled_from([2, 7]),
    drawn=st.booleans(),
    levels=st.sampled_from([1, 2, 5]),
)


@given(CASES)
@settings(deadline=None, max_examples=150)
def test_tokens_and_counts_are_the_oracles(case: Case) -> None:
    sampled, accepted = case.run()
    assert (sampled.tolist(), accepted.tolist()) == oracle(case)


@given(CASES)
@settings(deadline=None, max_examples=25)
def test_a_request_does_not_depend_on_its_batch(case: Case) -> None:
    sampled, accepted = case.run()
    for r in range(len(case.drafts)):
        alone, count = case.request(r).run()
        assert torch.equal(alone[0], sampled[r]) and count[0] == accepted[r]


@pytest.mark.parametrize("drawn", [False, True])
def test_every_count_from_none_to_all(drawn: bool) -> None:
    """Greedy: drafts that follow the target up to a chosen place; the token there is the target's."""
    steps, vocab = 4, 9
    drafts = tuple(d for d in range(steps + 1) for _ in range(d + 1))
    good = tuple(g for d in range(steps + 1) for g in range(d + 1))
    case = make(11, drafts, steps, vocab, drawn=drawn, levels=100)
    best, draft_ids = case.logits.argmax(-1), case.draft_ids.clone()
    for r, (count, right) in enumerate(zip(drafts, good, strict=True)):
        for j in range(count):
            token = best[case.cu_logits[r] + j]
            draft_ids[r, j] = token if j != right else (token + 1) % vocab
    sampled, accepted = replace(case, draft_ids=draft_ids, temperature=torch.zeros(len(drafts))).run()
    assert accepted.tolist() == list(good)
    for r, right in enumerate(good):
        start = int(case.cu_logits[r])
        expected = best[start : start + right + 1].tolist()
        assert sampled[r].tolist() == expected + [-1] * (steps - right)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("invalid", [-1, 5, 2**40])
def test_an_invalid_draft_is_never_accepted_nor_what_follows_it(temperature: float, invalid: int) -> None:
    logits = torch.zeros(4, 5).index_fill_(1, torch.tensor([3]), 200.0)
    draft_logits = logits[:3][None]
    case = Case(logits, (3,), torch.tensor([[3, invalid, 3]]), draft_logits, torch.tensor([temperature]),
                torch.tensor([1]), torch.arange(4))  # fmt: skip
    for one in (case, replace(case, draft_logits=None)):
        sampled, accepted = one.run()
        assert accepted.tolist() == [1] and sampled.tolist() == [[3, 3, -1, -1]]
    sampled, accepted = replace(case, draft_ids=torch.tensor([[3, 3, 3]])).run()
    assert accepted.tolist() == [3] and sampled.tolist() == [[3, 3, 3, 3]]


@pytest.mark.parametrize("steps", [0, 3])
def test_without_drafts_it_is_plain_sampling(steps: int) -> None:
    case = make(3, (0,) * 8, steps, 30, drawn=True, levels=50)
    sampled, accepted = case.run()
    plain = sample(case.logits, case.temperature, case.seeds, case.positions)
    assert torch.equal(sampled[:, 0], plain) and accepted.tolist() == [0] * 8
    assert (sampled[:, 1:] == -1).all()


def test_padding_rows_and_requests_without_rows() -> None:
    case = make(4, (2, 1), 2, 7, drawn=True)
    sampled, accepted = case.run()
    padded = replace(case, logits=torch.cat([case.logits, torch.full((3, 7), torch.nan)]), positions=torch.arange(8))
    padded.positions[:5] = case.positions
    assert all(torch.equal(a, b) for a, b in zip(padded.run(), (sampled, accepted), strict=True))

    def middle(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:1], x[:1], x[1:]])

    found, counts = verify(
        case.logits, torch.tensor([0, 3, 3, 5]), middle(case.draft_ids), middle(case.draft_logits),
        middle(case.temperature), middle(case.seeds), case.positions,
    )  # fmt: skip
    assert torch.equal(found[[0, 2]], sampled) and torch.equal(counts[[0, 2]], accepted)
    assert found[1].tolist() == [-1] * 3 and counts[1] == 0
    none = [x[:0] for x in (case.logits, case.positions)]
    found, counts = verify(none[0], torch.zeros(3, dtype=torch.int64), case.draft_ids, None, case.temperature,
                           case.seeds, none[1])  # fmt: skip
    assert found.tolist() == [[-1] * 3] * 2 and counts.tolist() == [0, 0]


def test_draft_logits_of_places_without_a_draft_are_not_looked_at() -> None:
    case = make(8, (0, 1, 2), 3, 6, drawn=True)
    assert case.draft_logits is not None
    poisoned = case.draft_logits.clone()
    for r, count in enumerate(case.drafts):
        poisoned[r, count:] = torch.nan
    case = replace(case, temperature=torch.ones(3))
    assert all(torch.equal(a, b) for a, b in zip(replace(case, draft_logits=poisoned).run(), case.run(), strict=True))


def test_nan_logits_stop_a_request_with_a_token_that_no_vocabulary_holds() -> None:
    case = make(5, (2, 2), 2, 6, drawn=True, levels=1)
    for temperature in (0.0, 1.0):
        broken = replace(case, logits=case.logits.index_fill(0, torch.tensor([0]), torch.nan),
                         temperature=torch.full((2,), temperature))  # fmt: skip
        sampled, accepted = broken.run()
        assert sampled[0].tolist() == [6, -1, -1] and accepted[0] == 0


def test_no_value_is_read_on_the_host_and_no_shape_depends_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: Case) -> None:
        cu_logits = case.cu_logits
        with FakeTensorMode() as mode:
            fake = [
                None if part is None else mode.from_tensor(part)
                for part in (case.logits, cu_logits, case.draft_ids, case.draft_logits, case.temperature, case.seeds,
                             case.positions)
            ]  # fmt: skip
            sampled, accepted = verify(*fake)
            assert sampled.shape == (len(case.drafts), 4) and accepted.shape == (len(case.drafts),)

    cases = [make(6, (3, 0, 1), 3, 7, drawn=drawn) for drawn in (False, True)]
    for case in cases:
        run(case)
    whole = verify_module._accepted

    def skips_when_none_is_accepted(*operands: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = whole(*operands)
        return found if found.any() else torch.zeros_like(found)

    monkeypatch.setattr(verify_module, "_accepted", skips_when_none_is_accepted)
    with pytest.raises(DataDependentOutputException):
        run(cases[0])


def test_operands_that_do_not_fit_are_all_named() -> None:
    case = make(7, (1, 2), 2, 5, drawn=True)
    with pytest.raises(ConfigError, match=r"seeds is \[1\], required \[2\]; positions is \[4\], required \[5\]"):
        replace(case, seeds=case.seeds[:1], positions=case.positions[:4]).run()
    with pytest.raises(ConfigError, match=r"draft_logits is \[2, 1, 5\], required \[2, 2, 5\]"):
        replace(case, draft_logits=case.draft_logits[:, :1]).run()
    with pytest.raises(ConfigError, match=r"required \[L, V\] and \[R, K\]"):
        replace(case, draft_ids=case.draft_ids[0]).run()


def _accepts_a_draft_after_a_rejected_one(whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *operands: whole(*operands).long().sort(1, descending=True).values.bool()


def _judges_the_next_row(whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda logits, rows, *rest: whole(logits, (rows + 1).clamp(max=len(logits) - 1), *rest)


@pytest.mark.parametrize("sabotage", [_accepts_a_draft_after_a_rejected_one, _judges_the_next_row])
def test_a_wrong_acceptance_is_seen(
    sabotage: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "_accepted", sabotage(verify_module._accepted))
    cases = [make(seed, (2, 3, 1, 4), 4, 7, drawn=True) for seed in range(10)]
    wrong = [case for case in cases if [x.tolist() for x in case.run()] != list(oracle(case))]
    assert wrong
