# SPDX-License-Identifier: Apache-2.0
"""Which form ``pcp::experts`` takes on which card, in a capture and outside. Fake CUDA tensors need no card."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pcp_passes.capture_mode import capturable_only, in_capture
from pcp_passes.errors import ConfigError, GraphError, HostSync
from pcp_passes.paged import experts
from pcp_passes.piecewise.sync_check import SyncCheck
from tests.unit.paged.test_experts import operands

pytestmark = pytest.mark.unit

Tensors = tuple[torch.Tensor, ...]
HOPPER, ADA, CONSUMER = (9, 0), (8, 9), (12, 0)


def on_card(
    monkeypatch: pytest.MonkeyPatch, card: tuple[int, int], capturing: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Tensors:
    """``hidden``, ``gate_up`` and ``down`` on a card of that capability, whose stream is being captured or not."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: card)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    with FakeTensorMode():
        return tuple(torch.empty(*shape, dtype=dtype, device="cuda") for shape in ((9, 16), (5, 48, 16), (5, 16, 24)))


@pytest.mark.parametrize(
    ("card", "has"),
    [((8, 0), False), (ADA, False), (HOPPER, True), ((10, 0), True), ((10, 3), True), ((11, 0), False),
     (CONSUMER, False), ((12, 1), False)],
)  # fmt: skip
def test_the_grouped_product_needs_a_card_of_major_9_or_10(
    card: tuple[int, int], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On all others PyTorch copies the group ends to the host and multiplies in a loop."""
    assert experts.has_grouped(*on_card(monkeypatch, card)) is has
    assert not experts.has_grouped(*on_card(monkeypatch, card, dtype=torch.float16))


def test_no_grouped_product_on_rocm_or_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm card says capability 9.x, too."""
    held = on_card(monkeypatch, (9, 4))
    assert experts.has_grouped(*held)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not experts.has_grouped(*held)
    monkeypatch.setattr(torch.version, "hip", None)
    assert not experts.has_grouped(*(torch.empty(x.shape, dtype=x.dtype) for x in held))


@pytest.mark.parametrize(
    ("card", "eager", "captured"),
    [(HOPPER, experts.grouped, experts.grouped), (CONSUMER, experts.loaded, experts.gathered),
     (ADA, experts.loaded, experts.gathered)],
)  # fmt: skip
def test_weights_are_copied_in_a_capture_alone(
    card: tuple[int, int], eager: experts.Form, captured: experts.Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefill of 8,192 rows would copy terabytes."""
    held = on_card(monkeypatch, card)
    assert experts.form_of(*held) is eager and not in_capture(held[0])
    with capturable_only():
        assert experts.form_of(*held) is captured and in_capture(held[0])
    held = on_card(monkeypatch, card, capturing=True)
    assert experts.form_of(*held) is captured and in_capture(held[0])


def test_the_form_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, _, _, gate_up, down = operands()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("asks for a card"))
    assert experts.form_of(hidden, gate_up, down) is experts.loaded
    with capturable_only():
        assert experts.form_of(hidden, gate_up, down) is experts.gathered


def test_reading_the_loads_on_a_card_is_a_fault_that_a_check_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the same form stands for a kernel; on a card it waits, whatever it says of itself."""
    hidden, gate_up, down = on_card(monkeypatch, CONSUMER)
    with hidden.fake_mode:  # type: ignore[attr-defined]
        chosen = torch.zeros(9, 2, dtype=torch.int64, device="cuda")
        with pytest.raises(HostSync, match=r"reads a \w+ on the host[\s\S]*experts\.py"), SyncCheck():
            experts.loaded(hidden, chosen, gate_up, down, experts.ACTIVATIONS["silu"])
    with SyncCheck():
        experts.experts_op(*operands(), "silu")


def test_the_loads_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read waits for all that is queued."""
    reads: list[torch.Size] = []
    true = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda held: [reads.append(held.shape), true(held)][1])
    monkeypatch.setattr(torch, "bincount", lambda *args, **kwargs: pytest.fail("asks the device for the largest"))
    experts.experts_op(*operands(), "silu")
    assert reads == [torch.Size([5])]


@pytest.mark.parametrize("wrong", [-1, 4])
def test_an_index_of_no_expert_is_refused(wrong: int) -> None:
    """Its rows would be whatever lay in memory, or another expert's."""
    hidden, chosen, *rest = operands()
    chosen[3, 1] = wrong
    with pytest.raises(ConfigError, match=rf"top_k_index from .*{wrong}.*required 0 to 3"):
        experts.experts_op(hidden, chosen, *rest, "silu")


def test_turns_of_a_large_model() -> None:
    """Two matrices of 7168 x 2048 in one and one in the other, of 2 bytes: 88 MB, so three rows at a time."""
    gate_up, down = (
        torch.empty(*shape, dtype=torch.float16, device="meta") for shape in ((8, 4096, 7168), (8, 7168, 2048))
    )
    assert experts.turns(256 * 8, gate_up, down) == 683
    assert experts.turns(24 * 8, gate_up, down) == 64 == experts.MAX_TURNS
    assert experts.most_pairs(gate_up, down) == 24 * 8
    assert experts.turns(0, gate_up, down) == 0


def test_a_graph_of_too_many_turns_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "GATHERED_BYTES", 3 * (48 * 16 + 16 * 24) * 2)
    hidden, gate_up, down = on_card(monkeypatch, ADA)
    experts.require_few_turns(64, 3, gate_up, down)  # 192 pairs
    with hidden.fake_mode, capturable_only():  # type: ignore[attr-defined]
        chosen = torch.zeros(97, 2, dtype=torch.int64, device="cuda")
        with pytest.raises(
            GraphError, match=r"97 rows x 2 experts.*2,304 B.*65 turns.*at most 64[\s\S]*piecewise.*96 rows"
        ):
            experts.gathered(hidden.new_empty(97, 16), chosen, gate_up, down, experts.ACTIVATIONS["silu"])


def test_a_cpu_has_no_graph_to_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay checker runs the function again; nothing is unrolled anywhere."""
    monkeypatch.setattr(experts, "GATHERED_BYTES", 0)
    monkeypatch.setattr(experts, "MAX_TURNS", 17)
    given = operands()
    wanted = experts.experts_op(*given, "silu")
    with capturable_only():
        torch.testing.assert_close(experts.experts_op(*given, "silu"), wanted)
