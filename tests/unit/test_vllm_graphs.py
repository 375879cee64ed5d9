# SPDX-License-Identifier: Apache-2.0
"""Piecewise CUDA graphs in vLLM: the double capture, and the check that stands for a replay. vLLM is not
needed for them."""

from __future__ import annotations

import operator
import sys
import weakref
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pcp_passes.errors import ConfigError, PcpError
from pcp_passes.frontends.vllm import backend, graphs, replay_check
from pcp_passes.frontends.vllm.drafting import DraftHooks
from pcp_passes.frontends.vllm.replay_check import POISON, ReplayCheck, ReplayError
from pcp_passes.frontends.vllm.runtime import Runtime
from pcp_passes.options import PcpOptions
from tests.vllm_graph_doubles import Descriptor, Graphs, Manager, Mode, Vllm

# -- the check that stands for a replay --------------------------------------------------------------------


class Doubling:
    """A piece with a fresh result and a view of its input."""

    def __init__(self, body: str = "backbone", index: int = 0) -> None:
        self.vllm_backend, self.piecewise_compile_index = SimpleNamespace(prefix=body), index

    def __call__(self, rows: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x[:rows]


class Fresh(Doubling):
    """A piece of whose input nothing is left in its result."""

    def __call__(self, rows: int, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Vllm:
    return Vllm(monkeypatch)


def piece(body: str = "backbone", index: int = 0) -> ReplayCheck:
    return ReplayCheck(Doubling(body, index), None, Mode.PIECEWISE)


def test_a_replay_answers_in_the_captured_buffers(vllm: Vllm) -> None:
    wrapper, x = piece(), torch.arange(4.0)
    first, _ = wrapper(2, x)
    x += 10
    again, again_view = wrapper(2, x)
    assert again is first and again.tolist() == [20, 22, 24, 26]
    assert again_view.data_ptr() == x.data_ptr() and again_view.tolist() == [10, 11]
    assert replay_check.report(None) == [{"body": "backbone", "piece": 0, "rows": 8, "hits": 1}]


@pytest.mark.parametrize("change", ["address", "shape", "stride", "dtype", "integer"])
def test_a_replay_on_other_inputs_is_refused(vllm: Vllm, change: str) -> None:
    wrapper, x = piece(index=3), torch.zeros(4, 4)
    wrapper(2, x)
    rows, other = {
        "address": (2, x.clone()),
        "shape": (2, x[:2]),
        "stride": (2, x.t()),
        "dtype": (2, x.view(torch.int32)),
        "integer": (3, x),
    }[change]
    with pytest.raises(ReplayError, match=r"piece 3 of backbone was captured with .* is replayed with .*Keep that"):
        wrapper(rows, other)


def test_an_input_that_nobody_keeps_is_refused(vllm: Vllm) -> None:
    """An allocator likes to hand out the same address again, where a graph's pool and the rest of the memory differ."""
    wrapper, x = piece(), torch.zeros(4, 4)
    wrapper.runnable = Fresh()
    wrapper(2, x)
    before = weakref.ref(x)
    del x
    assert before() is not None, "its address is not free"
    with pytest.raises(ReplayError, match="Keep that input in one buffer"):
        wrapper(2, torch.zeros(4, 4))


def test_other_bodies_find_what_is_left_overwritten(vllm: Vllm) -> None:
    target, second, drafter = piece(), piece(index=1), piece("eagle_head")
    x = torch.ones(4)
    left, _ = target(4, x)
    integers, _ = second(4, torch.ones(4, dtype=torch.int64))
    assert left.tolist() == [2] * 4, "the same body goes on"
    drafter(4, x)
    assert left.isnan().all() and integers.tolist() == [POISON] * 4
    assert x.tolist() == [1] * 4, "views of inputs are not the graph's"


def test_a_result_that_is_not_written_again_shows(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: a replay that forgets its results is not hidden by those of the capture."""
    wrapper, x = piece(), torch.ones(4)
    wrapper(4, x)
    wrapper.captures[Descriptor(8)].fresh.clear()
    with pytest.raises(ValueError, match="zip"):
        wrapper(4, x)


def test_late_captures_are_vllms_error(vllm: Vllm) -> None:
    wrapper, x = piece(), torch.ones(4)
    runner = SimpleNamespace(pcp_manager=Manager())
    assert graphs.around_capture_model(lambda runner: wrapper(4, x)[0].numel(), runner) == 4
    wrapper(4, x)
    vllm.rows = 16
    with pytest.raises(RuntimeError, match="inappropriate time"):
        wrapper(4, x)
    # vLLM captures once to measure, and again.
    graphs.around_capture_model(lambda runner: wrapper(4, x)[0].numel(), runner)
    assert {key.num_tokens for key in wrapper.captures} == {8, 16}


def test_vllm_clears_what_it_measured_with(vllm: Vllm) -> None:
    wrapper, x = piece(), torch.ones(4)
    wrapper(4, x)
    wrapper.clear_graphs()
    assert {wrapper: wrapper.dropped} == {wrapper: 1} and not wrapper.captures, "vLLM keeps its wrappers in a set"
    wrapper(4, x.clone())
    assert wrapper.captures, "and captures elsewhere"


def test_a_late_capture_names_body_and_size(vllm: Vllm) -> None:
    wrapper, x = piece(), torch.ones(4)
    entry = backend.BodyEntry({"sharded": wrapper}, Runtime(PcpOptions(), pcp=2, rank=0), "target")
    vllm.capturing, vllm.rows = False, 24
    with pytest.raises(PcpError, match="sharded body of the target has no captured CUDA graph of 24 rows") as found:
        entry(4, x)
    assert isinstance(found.value.__cause__, RuntimeError)
    wrapper.runnable, vllm.mode = failing, Mode.NONE
    with pytest.raises(RuntimeError, match=r"^another$"):
        entry(4, x)


def failing(*given: Any) -> Any:
    raise RuntimeError("another")


def test_a_runner_without_pcp_captures_when_it_likes(vllm: Vllm) -> None:
    assert graphs.around_capture_model(lambda runner: 7, SimpleNamespace(pcp_manager=None)) == 7
    assert vllm.capturing


def test_without_a_graph_mode_nothing_is_captured(vllm: Vllm) -> None:
    wrapper = piece()
    vllm.mode = Mode.NONE
    assert wrapper(1, torch.ones(2))[0].tolist() == [2, 2]
    assert wrapper.captures == {} and wrapper.unwrap().__class__ is Doubling
    assert wrapper.piecewise_compile_index == 0, "attributes are the piece's"


# -- the double capture ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_ours", lambda manager: manager if isinstance(manager, Manager) else None)


def target_passes(manager: Any, of: Graphs | None = None) -> list[tuple[Any, ...]]:
    seen = []

    def capture(of: Graphs, model: str, input_buffers: str, pcp_manager: Any = None, has_lora: bool = False) -> None:
        variant = manager.runtime.variants["target"] if manager else None
        seen.append((model, input_buffers, pcp_manager, variant, has_lora, of.sizes))

    graphs.around_target_capture(capture, of or Graphs(), "model", "rank-local", pcp_manager=manager, has_lora=True)
    return seen


def test_the_target_is_captured_once_for_each_body_on_its_own_buffers() -> None:
    manager = Manager()
    assert target_passes(manager) == [
        ("model", "rank-local", manager, "sharded", True, [32, 16, 8, 4]),
        ("model", "global", None, "replicated", True, [16, 8, 4]),
    ]
    assert manager.runtime.variants["target"] == "sharded"


def test_the_target_is_captured_once_where_no_step_is_replicated() -> None:
    assert len(target_passes(Manager("owner"))) == 1
    assert target_passes(None) == [("model", "rank-local", None, None, True, [32, 16, 8, 4])]


def test_what_is_dispatched_to_stays_when_a_capture_fails() -> None:
    of, manager = Graphs(), Manager()

    def capture(graphs: Graphs, input_buffers: str, pcp_manager: Any = None) -> None:
        if pcp_manager is None:
            raise RuntimeError(str(graphs.sizes))

    with pytest.raises(RuntimeError, match=r"^\[16, 8, 4\]$"):
        graphs.around_target_capture(capture, of, "rank-local", pcp_manager=manager)
    assert of.sizes == [32, 16, 8, 4]


@pytest.mark.parametrize(("sizes", "kept"), [((8, 4), [8, 4]), ((32,), [32]), ((64, 12, 8), [12, 8])])
def test_the_smallest_size_above_the_bound_is_captured(sizes: tuple[int, ...], kept: list[int]) -> None:
    assert target_passes(Manager(), Graphs(sizes))[1][-1] == kept


@pytest.mark.parametrize(("decode", "graphs_in_all"), [("replicate", 4 * 7 + 3 * 8), ("owner", 4 * 7)])
def test_the_number_of_graphs_is_said_once(
    vllm: Vllm, caplog: pytest.LogCaptureFixture, decode: str, graphs_in_all: int
) -> None:
    manager, of = Manager(decode), Graphs()
    of.vllm_config.compilation_config.cudagraph_capture_sizes = [32, 16, 8, 4]
    runner = SimpleNamespace(pcp_manager=manager, vllm_config=of.vllm_config)
    with caplog.at_level("INFO", logger="pcp_passes"):
        graphs.around_capture_model(lambda runner: 0, runner)
        assert not caplog.messages, "vLLM asks without graphs too"
        manager.runtime.pieces = {"backbone": 4, "backbone_replicated": 5, "eagle_head": 3, "eagle_head_replicated": 3}
        graphs.around_capture_model(lambda runner, profile_only: 0, runner, profile_only=True)
        graphs.around_capture_model(lambda runner: 0, runner)
    (said,) = caplog.messages
    assert f"capturing {graphs_in_all} CUDA graphs: 4 sizes up to 32 rows x 7 pieces of sharded bodies" in said
    assert ("3 sizes up to 16 rows x 8 pieces of replicated bodies" in said) is (decode == "replicate")
    assert "max_cudagraph_capture_size" in said


# -- what pieces read --------------------------------------------------------------------------------------


def body(*, regroups: bool) -> torch.fx.Graph:
    """A gather, its views, and what follows; ``regroups`` computes on the gathered rows once more."""
    aten, graph = torch.ops.aten, torch.fx.Graph()
    rows = graph.placeholder("rows")
    mine = graph.call_function(aten.unflatten.int, (graph.call_function(aten.relu.default, (rows,)), 1, [2, 2]))
    gathered = graph.call_function(torch.ops.pcp.all_gather_rows.default, (rows, 2, "pcp"))
    keys = graph.call_function(operator.getitem, (graph.call_function(aten.split_with_sizes, (gathered, [2, 2], 1)), 0))
    if regroups:
        keys = graph.call_function(aten.neg.default, (keys,))
    graph.call_function(aten.index_copy_.default, (rows, 0, rows, keys))
    graph.output(graph.call_function(aten.neg.default, (mine,)))
    return graph


def cut_at(node: torch.fx.Node) -> bool:
    return any(op in str(node.target) for op in ("all_gather_rows", "split_with_sizes", "unflatten", "index_copy_"))


def test_a_piece_that_reads_gathered_rows_is_refused() -> None:
    """Gathered rows are allocated by every step. The write may read them, and pieces may read views of their own."""
    graphs.require_kept_inputs(body(regroups=False), cut_at, "backbone")
    with pytest.raises(ConfigError, match=r"pieces of backbone .*\(neg_default reads getitem\); set cudagraph_mode"):
        graphs.require_kept_inputs(body(regroups=True), cut_at, "backbone")


@pytest.mark.parametrize(
    ("mode", "pcp", "refused"), [("PIECEWISE", 2, True), ("NONE", 2, False), ("PIECEWISE", 1, False)]
)
def test_bodies_are_looked_at_before_vllm_cuts_them(
    monkeypatch: pytest.MonkeyPatch, mode: str, pcp: int, refused: bool
) -> None:
    for name, values in {
        "vllm.compilation.backends": {"VllmBackend": None},
        "vllm.compilation.partition_rules": {"should_split": lambda node, ops: cut_at(node)},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    runtime = Runtime(PcpOptions(), pcp=pcp, rank=0)
    monkeypatch.setattr(backend.runtimes, "current", lambda: runtime)
    monkeypatch.setattr(backend, "_compile", lambda gm, inputs, compiler, name: compiler(gm, inputs))
    graph_mode = SimpleNamespace(has_piecewise_cudagraphs=lambda: mode == "PIECEWISE")
    compilation = SimpleNamespace(cudagraph_mode=graph_mode, splitting_ops=[])
    vllm_backend = SimpleNamespace(vllm_config=SimpleNamespace(compilation_config=compilation), prefix="backbone")
    vllm_backend.piecewise_graphs = [SimpleNamespace(is_splitting_graph=index % 2 == 1) for index in range(5)]
    gm = torch.fx.GraphModule(torch.nn.Module(), body(regroups=True))
    with pytest.raises(ConfigError, match="pieces of backbone") if refused else nullcontext():
        assert backend.around_vllm_backend(lambda *given: "compiled", vllm_backend, gm, []) == "compiled"
    assert runtime.pieces == {}, "nothing of ours is captured"
    gm = torch.fx.GraphModule(torch.nn.Module(), body(regroups=False))
    assert backend.around_vllm_backend(lambda *given: "compiled", vllm_backend, gm, []) == "compiled"
    assert runtime.pieces == ({"backbone": 3} if refused else {})


class Speculator:
    """Its passes end, as the real ones do, by choosing the body of the next."""

    def __init__(self, manager: Any) -> None:
        self.pcp_manager, self.prefill_cudagraph_manager = manager, Graphs()
        self.entered: list[str] = []

    def prefill(self) -> None:
        runtime = self.pcp_manager.runtime
        self.entered.append(runtime.variants["drafter"])
        runtime.variants["drafter"] = "replicated"


def draft_passes(speculator: Speculator, manager: Graphs) -> list[tuple[Any, ...]]:
    seen = []

    def capture(graphs: Graphs, forward_fn: Any, input_buffers: str, block_tables: Any) -> None:
        forward_fn()  # warm-up
        forward_fn()
        slots = None if isinstance(block_tables, str) else block_tables.get_dummy_slot_mappings(4)
        seen.append((input_buffers, slots, graphs.sizes))

    graphs.around_draft_capture(capture, manager, speculator.prefill, "global", "global tables")
    return seen


def test_the_drafters_first_pass_is_captured_once_for_each_body() -> None:
    speculator = Speculator(Manager())
    assert draft_passes(speculator, speculator.prefill_cudagraph_manager) == [
        ("rank-local", ("slots", 8), [32, 16, 8, 4]),
        ("global", None, [16, 8, 4]),
    ]
    assert speculator.prefill_cudagraph_manager.sizes == [32, 16, 8, 4]
    assert speculator.entered == ["sharded", "sharded", "replicated", "replicated"]


def test_later_passes_are_captured_as_vllm_does() -> None:
    speculator = Speculator(Manager())
    assert draft_passes(speculator, Graphs()) == [("global", None, [32, 16, 8, 4])]


class Upstream:
    input_buffers = "rank-local"

    def get_draft_input_buffers(self, input_buffers: str, *rows: int) -> Any:
        return (input_buffers, rows)


class Hooks(DraftHooks, Upstream):
    pass


@pytest.mark.parametrize(("variant", "buffers"), [("sharded", "rank-local"), ("replicated", "own")])
def test_a_dummy_pass_reads_what_real_passes_of_its_body_read(variant: Any, buffers: str) -> None:
    hooks: Any = Hooks()
    hooks.runtime = Manager().runtime
    hooks.runtime.variants["drafter"] = variant
    assert hooks.get_draft_input_buffers("own") == (buffers, ())
    assert hooks.get_draft_input_buffers("own", 8) == (buffers, (8,)), "vLLM 0.33 passes the rows too"


def test_replay_errors_are_ours() -> None:
    assert issubclass(ReplayError, PcpError)
