# SPDX-License-Identifier: Apache-2.0
"""The sync check: what it finds, what it lets pass, and a whole engine that runs under it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import pcp_passes.paged.experts  # noqa: F401  # registers pcp::experts
from pcp_passes.capture_mode import capturable_only
from pcp_passes.collectives import CollectiveLog
from pcp_passes.engine.engine import Engine
from pcp_passes.engine.options import EngineOptions, SamplingParams
from pcp_passes.engine.simulated import SimulatedExecutor
from pcp_passes.errors import HostSync
from pcp_passes.host_reads import allowed
from pcp_passes.ir.library import define
from pcp_passes.piecewise.sync_check import _STANDS_FOR_KERNEL, SyncCheck, if_wanted, why_synced
from pcp_passes.step.inputs import StepInputs, StepOutputs, StepPlanInputs
from pcp_passes.step.program import StepProgram
from tests import steps as small

pytestmark = pytest.mark.unit

X = torch.arange(4.0)
ONE = torch.tensor(2)
MASK = X > 1

READS: dict[str, tuple[Callable[[], Any], str]] = {
    "item": (lambda: X[0].item(), "Tensor.item"),
    "tolist": (lambda: X.tolist(), "Tensor.tolist"),
    "numpy": (lambda: X.numpy(), "Tensor.numpy"),
    "array": (lambda: np.asarray(X), "Tensor.__array__"),
    "if": (lambda: 1 if X[0] > 0 else 2, "Tensor.__bool__"),
    "int": (lambda: int(ONE), "Tensor.__int__"),
    "float": (lambda: float(ONE), "Tensor.__float__"),
    "range": (lambda: range(ONE), "Tensor.__index__"),  # type: ignore[call-overload]
    "an index without dimensions": (lambda: X[ONE], "aten::_local_scalar_dense"),
    "a slice to a tensor": (lambda: X[:ONE], "aten::_local_scalar_dense"),
    "cpu": (lambda: X.cpu(), "Tensor.cpu"),
    "to cpu": (lambda: X.to("cpu"), "Tensor.to"),
    "tensor of tensors": (lambda: torch.tensor([ONE, ONE]), "torch.tensor"),
    "equal": (lambda: torch.equal(X, X), "aten::equal"),
    "allclose": (lambda: torch.allclose(X, X), "aten::allclose"),
    "nonzero": (lambda: X.nonzero(), "aten::nonzero"),
    "where": (lambda: torch.where(MASK), "aten::nonzero"),
    "a boolean index": (lambda: X[MASK], "aten::index"),
    "a boolean index written": (lambda: X.clone().index_put_((MASK,), torch.ones(2)), "aten::index_put_"),
    "masked_select": (lambda: X.masked_select(MASK), "aten::masked_select"),
    "unique": (lambda: torch.unique(X), "aten::_unique2"),
    "bincount": (lambda: torch.bincount(X.long(), minlength=9), "aten::bincount"),
    "repeat_interleave": (lambda: X.repeat_interleave(torch.ones(4).long()), "aten::repeat_interleave"),
    "histc": (lambda: torch.histc(X), "aten::histc"),
}
STAYS: dict[str, Callable[[], Any]] = {
    "an index": lambda: X[ONE[None]],
    "one value at a boolean index": lambda: X.clone().index_put_((MASK,), torch.tensor(0.0)),
    "repeat_interleave with its size": lambda: X.repeat_interleave(torch.ones(4).long(), output_size=4),
    "to the device of the engine": lambda: X.to(torch.device("cpu")),
    "from numpy": lambda: torch.from_numpy(np.ones(3)).to(torch.device("cpu"), non_blocking=True),
    "where with values": lambda: torch.where(MASK, X, 0.0),
    "sizes": lambda: X[: len(X) - 1].numel(),
}


@pytest.mark.parametrize("name", READS)
def test_reads_are_named_with_their_line(name: str) -> None:
    read, op = READS[name]
    read()  # runs where nobody checks
    with pytest.raises(HostSync) as found, SyncCheck():
        read()
    line = read.__code__.co_firstlineno
    assert str(found.value).startswith(op)
    assert f"test_sync_check.py:{line} in <lambda>" in str(found.value)
    with SyncCheck(), allowed("the test says so"):
        read()


@pytest.mark.parametrize("name", STAYS)
def test_what_needs_no_host_passes(name: str) -> None:
    with SyncCheck():
        STAYS[name]()


def test_modes_end_with_the_check_also_after_an_error() -> None:
    with pytest.raises(HostSync), SyncCheck():
        X.tolist()
    assert X.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_ops_of_this_package_are_looked_into() -> None:
    define("sync_check_probe(Tensor x) -> Tensor", lambda x: x + x.tolist()[0], torch.empty_like)
    with pytest.raises(HostSync, match=r"Tensor.tolist[\s\S]*test_sync_check.py"), SyncCheck():
        torch.ops.pcp.sync_check_probe(X)


def test_a_reference_that_says_so_may_read_but_not_where_a_graph_is_captured() -> None:
    weights = torch.randn(2, 6, 4), torch.randn(2, 4, 3)
    call = torch.ops.pcp.experts, torch.randn(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1), *weights

    with SyncCheck():
        plain = call[0](*call[1:], "silu")
        with capturable_only():
            other = call[0](*call[1:], "silu")
    torch.testing.assert_close(other, plain)
    with pytest.raises(HostSync), SyncCheck(), capturable_only(), allowed("not in here"):
        X.tolist()


@pytest.mark.parametrize(
    ("copy", "why"),
    [
        (lambda host, gpu: (torch.ops.aten._to_copy.default, (gpu,), {"device": torch.device("cpu")}), "to the host"),
        (lambda host, gpu: (torch.ops.aten.copy_.default, (host, gpu), {}), "to the host"),
        (lambda host, gpu: (torch.ops.aten.copy_.default, (gpu, host), {}), "not pinned"),
        (lambda host, gpu: (torch.ops.aten._to_copy.default, (host,), {"device": torch.device("cuda")}), "not pinned"),
        (lambda host, gpu: (torch.ops.aten.copy_.default, (gpu, gpu), {}), ""),
        (lambda host, gpu: (torch.ops.aten._to_copy.default, (gpu,), {"dtype": torch.float64}), ""),
    ],
)
def test_copies_between_host_and_gpu(copy: Any, why: str) -> None:
    with FakeTensorMode():
        host, gpu = torch.empty(3), torch.empty(3, device="cuda")
    found = why_synced(*copy(host, gpu))
    assert why in found if why else found is None


def test_a_read_of_the_gpu_is_never_allowed() -> None:
    with FakeTensorMode():
        gpu = torch.empty(3, device="cuda")
    with pytest.raises(HostSync, match=r"Tensor\.cpu"), SyncCheck(), allowed("a reference of the CPU"):
        gpu.cpu()


def test_only_references_that_a_kernel_replaces_are_exempt() -> None:
    """``reference/paged.py`` is what a graph holds on a CPU; a file of the same name elsewhere is no reference."""
    folder = "/site/pcp_kernels/"
    exempt = [f"{folder}reference/{name}.py" for name in ("select", "mla", "pack", "cache")]
    assert all(_STANDS_FOR_KERNEL.search(file) for file in (*exempt, f"{folder}ops/launch.py"))
    others = [f"{folder}reference/paged.py", f"{folder}ops/mla.py", "/mine/reference/select.py"]
    assert not any(_STANDS_FOR_KERNEL.search(file) for file in others)


def _run_engine(
    graph_mode: str,
    executor: type[SimulatedExecutor] = SimulatedExecutor,
    program: Callable[..., StepProgram] = small.program,
) -> tuple[Any, Any]:
    sizes: dict[str, Any] = {} if graph_mode == "none" else {"graph_rows": (4, 12, 24), "graph_requests": (1, 2)}
    options = EngineOptions(
        pcp=2, block_size=4, num_blocks=40, max_len=40, max_requests=2, budget=24, graph_mode=graph_mode, **sizes
    )
    engine = Engine(executor(program(2, 2), options))
    outputs = {}
    for name, length in (("a", 17), ("b", 6)):
        engine.add_request([t % small.VOCAB for t in range(length)], SamplingParams(max_tokens=6), name)
    while engine.unfinished:
        outputs.update({output.id: output.tokens for output in engine.step()})
    summary = engine.summary()
    engine.close()
    return outputs, summary


@pytest.mark.parametrize("graph_mode", ["none", "piecewise", "full_decode_only", "full_and_piecewise"])
def test_an_engine_runs_under_the_check(graph_mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warm-up, prefill and decode steps of target and drafter; and they give what they give without it."""
    plain, _ = _run_engine("none")
    monkeypatch.setenv("PCP_SYNC_CHECK", "1")
    found, summary = _run_engine(graph_mode)
    assert found == plain
    assert graph_mode == "none" or summary["graph_hits"]


@pytest.mark.parametrize("program", [partial(small.program, topk=True), small.block_program])
def test_steps_with_an_indexer_or_a_block_drafter_run_under_the_check(
    program: Callable[..., StepProgram], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCP_SYNC_CHECK", "1")
    assert _run_engine("full_and_piecewise", program=program)[1]["graph_hits"]


class _Reads(SimulatedExecutor):
    """A step that looks at what it sampled before the next one is prepared."""

    def _run(
        self, inputs: Sequence[StepInputs], plans: Sequence[StepPlanInputs]
    ) -> tuple[list[StepOutputs], CollectiveLog]:
        outputs, log = super()._run(inputs, plans)
        outputs[0].num_rejected.max().item()
        return outputs, log


def test_an_engine_that_reads_inside_a_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _run_engine("none", _Reads)
    monkeypatch.setenv("PCP_SYNC_CHECK", "1")
    with pytest.raises(HostSync, match=r"Tensor.item[\s\S]*num_rejected.max\(\).item\(\)"):
        _run_engine("none", _Reads)


def test_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCP_SYNC_CHECK", raising=False)
    with if_wanted():
        X.tolist()
    monkeypatch.setenv("PCP_SYNC_CHECK", "1")
    with pytest.raises(HostSync), if_wanted():
        X.tolist()
