# SPDX-License-Identifier: Apache-2.0
"""Pipeline stages in vLLM: what of them needs no vLLM. Drafts that ride on outputs, failures that nobody hears, a
drafter without an embedding."""

from __future__ import annotations

import logging
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import config_parallel, pipeline, runtime
from pcp_passes.options import PcpOptions


def configuration(*, stages: int = 2, drafts: bool = True, ahead: bool = False, ours: bool = True) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages),
        speculative_config=SimpleNamespace(method="mtp") if drafts else None,
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
        additional_config={"pcp_passes": {}} if ours else {},
    )


@pytest.mark.parametrize(
    "changed, queue, called",
    [
        ({}, [], False),
        ({}, None, True),
        ({"stages": 1}, [], True),
        ({"drafts": False}, [], True),
        ({"ahead": True}, [], True),
        ({"ours": False}, [], True),
    ],
)
def test_the_engine_fetches_drafts_itself_unless_they_ride(changed: dict[str, Any], queue: Any, called: bool) -> None:
    calls = []
    engine = SimpleNamespace(batch_queue=queue, vllm_config=configuration(**changed))
    pipeline.around_post_step(lambda engine, done: calls.append(done), engine, True)
    assert calls == [True] * called


class Scheduler:
    """Notes the drafts that it is told of, and in which order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.requests = {
            name: SimpleNamespace(
                status=SimpleNamespace(name=status), num_tokens=9, num_computed_tokens=8 if name != "e" else 9
            )
            for name, status in zip("abcde", ("RUNNING",) * 3 + ("PREEMPTED", "RUNNING"), strict=True)
        }

    def update_from_output(self, scheduler_output: Any, output: Any) -> str:
        self.seen.append("output")
        return "outputs of the engine"

    def update_draft_token_ids(self, drafts: Any) -> None:
        self.seen.append(dict(zip(drafts.req_ids, drafts.draft_token_ids, strict=True)))


def told(**more: Any) -> list[Any]:
    scheduler = Scheduler()
    output = SimpleNamespace(req_ids=[*"abcdef"], sampled_token_ids=[[4], [], [5, 6], [7], [8], [9]], **more)
    result = pipeline.around_update_from_output(Scheduler.update_from_output, scheduler, None, output)
    assert result == "outputs of the engine"
    return scheduler.seen


def test_the_scheduler_learns_of_drafts_with_the_tokens_before_them() -> None:
    """``b`` is in the middle of its prefill: its drafts are of nothing. ``d`` was preempted, ``e`` has a step in
    flight, and ``f`` has left."""
    drafts = SimpleNamespace(req_ids=[*"abcdef"], draft_token_ids=[[i, i] for i in range(1, 7)])
    assert told(**{pipeline.DRAFTS: drafts}) == ["output", {"a": [1, 1], "c": [3, 3]}]


def test_outputs_without_drafts_are_left_alone() -> None:
    assert told() == ["output"]


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> runtime.Runtime:
    found = runtime.Runtime(PcpOptions(), pcp=1, rank=0, stages=2, answers=False, name="rank 0 (dp0 pp0 pcp0)")
    monkeypatch.setattr(runtime, "_current", found)
    return found


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when the process would have ended."""
    found = threading.Event()
    monkeypatch.setattr(pipeline, "GRACE_S", 0.05)
    monkeypatch.setattr(pipeline.os, "_exit", lambda code: found.set())
    return found


def fail(*args: Any, **kwargs: Any) -> None:
    raise ValueError("planted")


def test_a_worker_that_nobody_waits_for_ends_with_the_reason(
    current: runtime.Runtime, ended: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL), pytest.raises(ValueError, match="planted"):
        pipeline.around_execute_model(fail, SimpleNamespace())
    assert ended.wait(5)
    assert "rank 0 (dp0 pp0 pcp0) is lost: it failed with ValueError: planted" in caplog.text


def test_a_failure_that_is_heard_ends_nothing(current: runtime.Runtime, ended: threading.Event) -> None:
    current.answers = True
    with pytest.raises(ValueError, match="planted"):
        pipeline.around_execute_model(fail, SimpleNamespace())
    assert not ended.wait(0.3)


class Drafter:
    """A draft module of layer 3 whose loader found ``loaded``, and says so unless it is ``silent``."""

    config = SimpleNamespace(num_hidden_layers=3)

    def __init__(self, *loaded: str, silent: bool = False) -> None:
        self.loaded, self.silent = set(loaded), silent
        names = ("model.embed_tokens.weight", "model.layers.3.eh_proj.weight")
        self.parameters = {name: torch.nn.Parameter(torch.zeros(2, 2)) for name in names}

    def named_parameters(self) -> list[tuple[str, Any]]:
        return list(self.parameters.items())

    def load_weights(self, weights: Any) -> set[str] | None:
        for name in self.loaded:
            self.parameters[name].data.fill_(1.0)
        return None if self.silent else self.loaded


@pytest.mark.parametrize("silent", [False, True])
def test_a_drafter_without_an_embedding_is_refused_naming_the_tensors(current: runtime.Runtime, silent: bool) -> None:
    with pytest.raises(ConfigError) as refused:
        pipeline.around_draft_load(Drafter.load_weights, Drafter("model.layers.3.eh_proj.weight", silent=silent), ())
    message = str(refused.value)
    assert "(Drafter) is on the last of 2 pipeline stages" in message
    assert "neither 'model.layers.3.embed_tokens.weight' nor 'model.embed_tokens.weight'" in message
    assert "pipeline_parallel_size to 1" in message


@pytest.mark.parametrize("stages, loaded", [(2, ("model.embed_tokens.weight",)), (1, ())])
def test_a_drafter_with_its_own_or_its_targets_embedding_loads(
    current: runtime.Runtime, stages: int, loaded: tuple[str, ...]
) -> None:
    current.stages = stages
    assert pipeline.around_draft_load(Drafter.load_weights, Drafter(*loaded), ()) == set(loaded)


def test_a_loader_that_says_nothing_is_believed_by_what_it_loaded(current: runtime.Runtime) -> None:
    drafter = Drafter("model.embed_tokens.weight", silent=True)
    assert pipeline.around_draft_load(Drafter.load_weights, drafter, ()) is None
    assert all(torch.isfinite(parameter).all() for parameter in drafter.parameters.values())


def test_only_the_first_load_is_watched(current: runtime.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are synchronised later come in parts."""
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils = ModuleType("vllm.model_executor.model_loader.utils")
    vars(utils)["get_model_cls"] = lambda model: Drafter
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    config, part = configuration(), Drafter("model.layers.3.eh_proj.weight")
    config.speculative_config.draft_model_config = None
    plain = Drafter.load_weights
    with pytest.raises(ConfigError, match="on the last of 2"), pipeline.draft_embedding_watched(config):
        part.load_weights(())
    assert Drafter.load_weights is plain
    assert part.load_weights(()) == part.loaded
    with pipeline.draft_embedding_watched(configuration(stages=1)):
        assert Drafter.load_weights is plain


def whole(
    *,
    method: str | None = "mtp",
    layers: int = 4,
    hybrid: bool = False,
    experts: int = 0,
    graphs: str = "NONE",
    ahead: bool = False,
    sparse: dict[str, Any] | None = None,
    **sizes: int,
) -> Any:
    parallel = {"data": 1, "pipeline": 2, "prefill_context": 1, "tensor": 1} | sizes
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            enable_expert_parallel=True, **{f"{name}_parallel_size": size for name, size in parallel.items()}
        ),
        model_config=SimpleNamespace(
            is_moe=experts > 0,
            is_hybrid=hybrid,
            has_inner_state=hybrid,
            get_num_experts=lambda: experts,
            get_total_num_hidden_layers=lambda: layers,
            hf_text_config=SimpleNamespace(num_hidden_layers=layers, **sparse or {}),
        ),
        speculative_config=None if method is None else SimpleNamespace(method=method),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=graphs)),
        scheduler_config=SimpleNamespace(async_scheduling=ahead),
    )


def test_the_mesh_of_a_configuration() -> None:
    found = config_parallel.mesh_of(whole(data=2, pipeline=3, prefill_context=4, tensor=5))
    assert (found.dp, found.pp, found.pcp, found.tp, found.fold_on_tp) == (2, 3, 4, 5, False)


def test_what_the_table_refuses_is_refused() -> None:
    assert config_parallel.mesh(whole()) is None
    assert "pipeline_parallel_size=5 stages" in str(config_parallel.mesh(whole(pipeline=5)))
    assert "recurrent state" in str(config_parallel.mesh(whole(hybrid=True)))
    assert config_parallel.mesh(whole(hybrid=True, pipeline=1)) is None


def test_stages_alone_run_experts_in_graphs_and_recurrent_states() -> None:
    """There vLLM's own bodies run; with PCP beside the stages the same is refused, in vLLM's words."""
    graphs: dict[str, Any] = {"experts": 8, "graphs": "FULL_AND_PIECEWISE"}
    assert config_parallel.mesh(whole(**graphs)) is None
    refused = str(config_parallel.mesh(whole(prefill_context=2, **graphs)))
    assert (
        "cudagraph_mode=" in refused
        and "drop enable_expert_parallel" in refused
        and "graph_mode='" not in (refused.replace("cudagraph_mode", ""))
    )
    assert config_parallel.mesh(whole(hybrid=True, method=None)) is None
    assert "recurrent state" in str(config_parallel.mesh(whole(hybrid=True, method=None, prefill_context=2)))


def test_names_of_the_table_become_vllms() -> None:
    said = config_parallel.as_vllm_says("pp=5, pcp=2, tp=1, dp=3 and graph_mode='full' of PP5xPCP2 or its steps")
    assert said == (
        "pipeline_parallel_size=5, prefill_context_parallel_size=2, tensor_parallel_size=1, data_parallel_size=3 and "
        "cudagraph_mode='full' of PP5xPCP2 or its steps"
    )


#: Layers without an indexer, of six.
PATTERN = {"index_topk": 64, "index_topk_pattern": "FSFSSF"}
EVERY_FOURTH = {"index_topk": 64, "index_topk_freq": 4, "index_skip_topk_offset": 3}


@pytest.mark.parametrize(
    "layers, sparse, stages, shared",
    [
        (6, PATTERN, 2, "[3]"),
        (6, PATTERN, 3, "[4]"),
        (6, PATTERN, 1, ""),
        (6, {}, 2, ""),
        (6, {"index_topk": 64}, 2, ""),
        (78, EVERY_FOURTH, 2, "[39]"),
        (60, EVERY_FOURTH, 2, ""),
    ],
)
def test_a_stage_that_starts_on_a_shared_selection(
    layers: int, sparse: dict[str, Any], stages: int, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    utils = ModuleType("vllm.distributed.utils")
    vars(utils)["get_pp_indices"] = lambda count, stage, of: (count // of * stage, count // of * (stage + 1))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    found = config_parallel.shared_selection(whole(layers=layers, sparse=sparse, pipeline=stages))
    assert (found is None) == (not shared)
    if shared:
        assert f"layers {shared}, " in str(found) and "VLLM_PP_LAYER_PARTITION" in str(found)


@pytest.mark.parametrize(
    "method, stages, refused", [("mtp", 2, False), (None, 2, False), ("ngram", 2, True), ("ngram", 1, False)]
)
def test_drafters_that_run_over_stages(method: str | None, stages: int, refused: bool) -> None:
    reason = config_parallel.staged_drafter(whole(method=method, pipeline=stages))
    assert (reason is not None) is refused
    if refused:
        assert "method 'ngram'" in str(reason) and "pipeline_parallel_size=2" in str(reason) and "'mtp'" in str(reason)


@pytest.mark.parametrize(
    "pcp, ahead, cpu, refused",
    [(1, True, False, False), (1, True, True, True), (1, False, False, True), (2, True, False, True)],
)
def test_stages_alone_leave_vllms_own_drafters(
    pcp: int, ahead: bool, cpu: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platforms = ModuleType("vllm.platforms")
    vars(platforms)["current_platform"] = SimpleNamespace(is_cpu=lambda: cpu)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    reason = config_parallel.staged_drafter(whole(method="eagle3", prefill_context=pcp, ahead=ahead))
    assert (reason is not None) is refused
