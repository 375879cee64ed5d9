# SPDX-License-Identifier: Apache-2.0
"""What is read off a program is what runs: bytes, calls, addresses, rows."""

import pytest
import torch

from pcp_passes.errors import ConfigError
from pcp_passes.passes.observers import VerifyObserver
from pcp_passes.step.calls import BodyCall
from pcp_passes.step.report import sizes_of, step_report
from tests import steps

pytestmark = pytest.mark.unit
PROGRAMS = {
    "mtp": lambda pcp: steps.program(pcp, observers=(VerifyObserver("every"),)),
    "naive": lambda pcp: steps.program(pcp, optimize=False),
    "shared top-k": lambda pcp: steps.program(pcp, topk=True, share_topk="owner"),
    "broadcast": lambda pcp: steps.program(pcp, verify_tokens="broadcast"),
    "block drafter": steps.block_program,
    "no drafter": lambda pcp: steps.program(pcp, 0),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("pcp", [2, 4])
def test_counted_bytes_are_the_bytes_of_the_run(name: str, pcp: int) -> None:
    host = steps.Host(PROGRAMS[name](pcp), steps.requests())
    for scheduled in steps.MIXED:
        inputs, layout = host.batch(scheduled)
        sizes = sizes_of(layout, inputs.logit_rows.numpy())
        report = step_report(host.program, sizes, sharded=not layout.is_replicated)
        host.step(scheduled)
        assert [(log.calls, log.bytes) for log in host.logs] == [(report.collectives, report.bytes)] * pcp


def _sizes(host: steps.Host) -> object:
    inputs, layout = host.batch([(0, 9), (1, 6)])
    return sizes_of(layout, inputs.logit_rows.numpy())


def test_nothing_lies_between_target_and_first_draft_pass() -> None:
    host = steps.Host(steps.program(4), steps.requests())
    report = step_report(host.program, _sizes(host))
    boundary = report.boundary
    assert (boundary.copies, boundary.bytes, boundary.same_inputs, boundary.same_tokens) == (0, 0, True, True)
    assert [(line.source, line.restored) for line in report.restores] == [
        ("target.sharded", report.sizes.logit_rows), ("drafter.sharded", report.sizes.logit_rows),
    ]  # fmt: skip
    assert [(line.body, line.rows) for line in report.calls] == [
        ("target.sharded", report.sizes.rows), ("drafter.sharded", report.sizes.rows),
        ("drafter.replicated", 2), ("drafter.replicated", 2),
    ]  # fmt: skip


def test_the_naive_program_moves_everything_and_the_report_says_so() -> None:
    """Sabotage of the report: the same program without the passes that save."""
    host = steps.Host(steps.program(4, optimize=False), steps.requests())
    report = step_report(host.program, _sizes(host))
    boundary = report.boundary
    assert boundary.copies > 0 and not boundary.same_inputs and not boundary.same_tokens
    assert boundary.bytes == report.sizes.rows * steps.HIDDEN * 8
    assert [line.restored for line in report.restores] == [report.sizes.tokens] * 2


def _recorded(program, monkeypatch) -> list[tuple[str, tuple]]:
    """Operands of every body call of rank 0 in one sharded step."""
    host = steps.Host(program, steps.requests())
    seen: list[tuple[str, tuple]] = []
    nested = BodyCall.nested

    def record(self, operands):
        if operands[-1] is host.states[0].caches:
            kept = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in operands[:-1]]
            seen.append((self.variant, kept))
        return nested(self, operands)

    monkeypatch.setattr(BodyCall, "nested", record)
    host.step([(0, 9), (1, 6)])
    return seen


def test_the_first_draft_pass_has_the_addresses_of_the_target(monkeypatch) -> None:
    calls = _recorded(steps.program(2), monkeypatch)
    (_, target), (_, drafter) = calls[:2]
    ids, positions, _, inputs = drafter
    assert (ids, positions) == tuple(target[:2]) and inputs is target[2]
    results: list[int] = []
    unpacked = BodyCall.unpacked

    def record(self, found):
        made = unpacked(self, found)
        results.append(made.data_ptr())
        return made

    monkeypatch.setattr(BodyCall, "unpacked", record)
    again = _recorded(steps.program(2), monkeypatch)
    assert again[1][1][2] in results, "the hidden states are the target's own"


def test_the_naive_program_has_other_addresses(monkeypatch) -> None:
    calls = _recorded(steps.program(2, optimize=False), monkeypatch)
    (_, target), (_, drafter) = calls[:2]
    assert drafter[0] != target[0] and drafter[1] != target[1] and drafter[3] is not target[2]


def test_a_program_of_one_rank_has_nothing_to_count_but_the_plain_part() -> None:
    host = steps.Host(steps.program(1), steps.requests())
    with pytest.raises(ConfigError, match="has no sharded part"):
        step_report(host.program, _sizes(host))
    report = step_report(host.program, _sizes(host), sharded=False)
    assert (report.collectives, report.bytes, report.boundary) == (0, 0, None)
    assert report.to_json()["drafts"] == 3
