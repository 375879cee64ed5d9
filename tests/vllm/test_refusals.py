# SPDX-License-Identifier: Apache-2.0
"""What cannot run is refused before a worker starts, by one clear error; and nothing is refused that is not ours.

All configurations are built in two child processes, which take some seconds to import vLLM and milliseconds a case:
one with the CPU stand-ins, one without (there Triton finds no device). A child writes what happened as JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pcp_passes.frontends.vllm import cpu_runner
from pcp_passes.piecewise.buckets import derive_buckets
from tests.models import build
from tests.vllm.configurations import CASES, ELSEWHERE, FOREIGN, MODEL, OURS, Case, compilation

ROOT = Path(__file__).resolve().parents[2]
REFUSED = [name for name, case in CASES.items() if case.message]
WITHOUT_STAND_INS = ("no triton", "one rank, eager")


@pytest.fixture(scope="module")
def happened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What happened to a case; both children are started at the first question and run at the same time."""
    folder = tmp_path_factory.mktemp("refusals")
    models = {name: str(build(model)) for name, model in MODEL.items()}
    children = {}
    for stand_ins in (True, False):
        arguments = [str(folder / str(stand_ins)), json.dumps(models), str(int(stand_ins))]
        with (folder / f"{stand_ins}.log").open("wb") as log:
            children[stand_ins] = subprocess.Popen(
                [sys.executable, "-m", "tests.vllm.test_refusals", *arguments],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {"VLLM_NO_USAGE_STATS": "1"},
            )
    try:
        for stand_ins, child in children.items():
            assert child.wait(200) == 0, (folder / f"{stand_ins}.log").read_text()[-3000:]
    finally:
        for child in children.values():
            child.kill()
            child.wait()
    results = {stand_ins: json.loads((folder / str(stand_ins)).read_text()) for stand_ins in children}
    return lambda name: results[name not in WITHOUT_STAND_INS][name]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_clear_error(name: str, happened: Callable[[str], dict[str, Any]]) -> None:
    found = happened(name)["ours"]
    assert "error" in found, found
    assert found["error"] == "ConfigError"
    assert "\n" not in found["message"]
    for fragment in CASES[name].message:
        assert fragment in found["message"]


@pytest.mark.parametrize("name", CASES)
def test_absent_or_off_is_stock(name: str, happened: Callable[[str], dict[str, Any]]) -> None:
    """The same arguments without our key, and with mode off, do what they do where our hook is not installed."""
    for ours, stock in happened(name)["stock"].values():
        assert ours == stock
        assert stock.get("error") != "ConfigError"


def test_stock_is_compared_on_accepted_and_refused_arguments(happened: Callable[[str], dict[str, Any]]) -> None:
    outcomes = {name: "error" in happened(name)["stock"]["off"][1] for name in CASES}
    assert not outcomes["lora"] and not outcomes["eager"] and not outcomes["plain"]
    assert outcomes["v1 runner"]


@pytest.mark.parametrize("name", [name for name in CASES if name not in REFUSED])
def test_accepted(name: str, happened: Callable[[str], dict[str, Any]]) -> None:
    found = happened(name)["ours"]
    assert "error" not in found, found
    assert not found["callers_dict_changed"]


def test_accepted_arguments_reach_the_passes(happened: Callable[[str], dict[str, Any]]) -> None:
    for name in ("plain", "mla", "no mode asked for", "check on one rank"):
        found = happened(name)["ours"]
        assert (found["mode"], found["backend"]) == (2, OURS + "inductor"), name
        assert found["keys"] == ["pcp_passes", "pcp_passes_build"] and found["aot"] == "0"
    assert happened("back end by name")["ours"]["backend"] == OURS + "eager"
    piecewise = happened("mode 3")["ours"]
    assert piecewise["mode"] == 3 and "pcp::all_gather_rows" in piecewise["splitting_ops"]
    assert happened("another plugin's key")["ours"]["keys"] == ["someone_else"]


def test_graph_sizes_and_splits_are_completed(happened: Callable[[str], dict[str, Any]]) -> None:
    """No rank has more than 272 rows, so of the larger sizes only the smallest is captured, and compiled."""
    found = happened("piecewise graphs")["ours"]
    assert found["graphs"] == "PIECEWISE"
    assert found["capture_sizes"] == [8, 256, 320]
    assert sorted(found["compile_sizes"]) == [8, 100, 256, 320]
    buckets = derive_buckets(budget=2048, pcp=2, max_requests=32, steps=0)
    assert happened("piecewise graphs, sizes left out")["ours"]["capture_sizes"] == list(buckets.rows)
    assert happened("piecewise graphs, largest size")["ours"]["capture_sizes"] == [1, 2, 4, 8, 16], "as the user limits"
    for name in ("piecewise graphs", "some splits"):
        splits = happened(name)["ours"]["splitting_ops"]
        assert {"vllm::unified_attention_with_output", "vllm::unified_mla_attention_with_output"} <= set(splits)
        assert {"vllm::unified_kv_cache_update", "pcp::all_gather_rows", "aten::split_with_sizes"} <= set(splits)
        assert len(splits) == len(set(splits))
    for name in ("plain", "mode 3"):
        assert happened(name)["ours"]["graphs"] == "NONE", "nobody asked for graphs"


def test_every_refusal_is_exercised(happened: Callable[[str], dict[str, Any]]) -> None:
    """A check that no case reaches could be broken without anyone noticing."""
    fired = {name for case in CASES for name in happened(case)["fired"]}
    assert fired | set(ELSEWHERE) == set(happened("plain")["refusals"])


def test_group_of_another_size_is_refused(happened: Callable[[str], dict[str, Any]]) -> None:
    assert happened("worker")["group of 3 for 2"] == [
        "ConfigError",
        "the PCP group has 3 ranks but prefill_context_parallel_size is 2; start as many workers as TP x PP x PCP "
        "asks for.",
    ]


def test_recurrent_state_is_refused_naming_every_layer(happened: Callable[[str], dict[str, Any]]) -> None:
    kind, message = happened("worker")["attention and mamba layers"]
    assert kind == "ConfigError"
    assert "recurrent state" in message and "run this model without PCP" in message
    assert "layers.1 (MambaSpec), layers.3 (MambaSpec);" in message and "layers.0" not in message


def test_attention_layers_are_accepted_and_lose_the_native_gather(happened: Callable[[str], dict[str, Any]]) -> None:
    assert happened("worker")["attention layers"] == {"layers.0": False, "layers.1": False}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_refused_on_other_platforms(name: str, happened: Callable[[str], dict[str, Any]]) -> None:
    refused, accepted = happened("worker")[name]
    assert all(fragment in refused for fragment in ELSEWHERE[name][2])
    assert accepted is None


# The child.


def _main(target: str, models: dict[str, str], stand_ins: bool) -> None:
    if stand_ins:
        cpu_runner.enable()
    from vllm.engine.arg_utils import EngineArgs

    from pcp_passes.frontends.vllm import config, plugin

    plugin.register()
    fired: list[str] = []
    names = _record(config, "_REFUSALS", fired) + _record(config, "_ARGUMENT_REFUSALS", fired)
    wrapped = EngineArgs.create_engine_config
    stock = wrapped.__pcp_passes_original__  # type: ignore[attr-defined]
    models["folder"] = f"{target}.models"
    with _environment({}):  # what vLLM does once per process
        _outcome(stock, models, Case(), {})
    results = {}
    for name, case in CASES.items():
        if (name not in WITHOUT_STAND_INS) is not stand_ins:
            continue
        fired.clear()
        with _environment(case.env):
            ours = _outcome(wrapped, models, case, {case.key: case.options})
        results[name] = {"ours": ours, "fired": list(fired), "refusals": names, "stock": {}}
        for label, additional in (("absent", {}), ("off", {"pcp_passes": {"mode": "off"}})):
            outcomes = []
            for create in (wrapped, stock):
                with _environment(case.env):
                    outcomes.append(_outcome(create, models, case, additional))
            results[name]["stock"][label] = outcomes
    if stand_ins:
        results["worker"] = _worker()
    Path(target).write_text(json.dumps(results))


def _worker() -> dict[str, Any]:
    """Refusals of a worker, on vLLM's classes, with a group and layers made up."""
    from vllm.distributed import parallel_state
    from vllm.v1 import kv_cache_interface as caches

    from pcp_passes.errors import ConfigError
    from pcp_passes.frontends.vllm import plugin, runtime
    from pcp_passes.options import PcpOptions

    def config(**layers: type) -> Any:
        # The kind of a layer's cache is all that is looked at, so the specification needs no values.
        context = {
            name.replace("_", "."): SimpleNamespace(
                use_pcp=True, get_kv_cache_spec=lambda config, spec=spec: object.__new__(spec)
            )
            for name, spec in layers.items()
        }
        return SimpleNamespace(
            parallel_config=SimpleNamespace(prefill_context_parallel_size=2),
            compilation_config=SimpleNamespace(static_forward_context=context),
        )

    def refusal(call: Callable[..., Any], *arguments: Any) -> list[str]:
        try:
            call(*arguments)
        except ConfigError as error:
            return [type(error).__name__, str(error)]
        return []

    parallel_state.get_pcp_group = lambda: SimpleNamespace(world_size=3, rank_in_group=0)
    attention, recurrent = caches.FullAttentionSpec, caches.MambaSpec
    mixed = config(layers_0=attention, layers_1=recurrent, layers_2=caches.MLAAttentionSpec, layers_3=recurrent)
    dense = config(layers_0=attention, layers_1=caches.SlidingWindowSpec)
    results: dict[str, Any] = {
        "group of 3 for 2": refusal(runtime.start, PcpOptions(), config()),
        "attention and mamba layers": refusal(plugin._own_the_gather, mixed),
    }
    plugin._own_the_gather(dense)
    layers = dense.compilation_config.static_forward_context
    results["attention layers"] = {name: layer.use_pcp for name, layer in layers.items()}
    return results | _elsewhere()


def _elsewhere() -> dict[str, Any]:
    from unittest.mock import patch

    from vllm.platforms import current_platform

    from pcp_passes.frontends.vllm import config

    with patch.object(type(current_platform), "is_cpu", lambda self: False):
        return {
            name: [getattr(config, name)(SimpleNamespace(**wrong)), getattr(config, name)(SimpleNamespace(**right))]
            for name, (wrong, right, _) in ELSEWHERE.items()
        }


def _record(config: Any, table: str, fired: list[str]) -> list[str]:
    def recording(refuse: Callable[[Any], str | None]) -> Callable[[Any], str | None]:
        def call(found: Any) -> str | None:
            reason = refuse(found)
            fired.extend([refuse.__name__] if reason else [])
            return reason

        return call

    refusals = getattr(config, table)
    setattr(config, table, tuple(map(recording, refusals)))
    return [refuse.__name__ for refuse in refusals]


@contextmanager
def _environment(changes: dict[str, str | None]) -> Iterator[None]:
    """Each case starts from the same environment: vLLM and we set variables while a configuration is made."""
    before = dict(os.environ)
    for key, value in changes.items():
        os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _outcome(create: Callable[..., Any], models: dict[str, str], case: Case, additional: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "dtype": "float32",
        "prefill_context_parallel_size": 2,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "additional_config": dict(additional),
        **compilation(),
        **case.arguments,
    }
    if case.model not in ("mla", "mtp", "moe", "two modules"):
        arguments["block_size"] = 32
    environment = dict(os.environ)
    try:
        found = create(EngineArgs(model=_model(models, case.model), **arguments))
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {
        "mode": int(found.compilation_config.mode),
        "backend": found.compilation_config.backend,
        "splitting_ops": found.compilation_config.splitting_ops,
        "graphs": found.compilation_config.cudagraph_mode.name,
        "capture_sizes": found.compilation_config.cudagraph_capture_sizes,
        "compile_sizes": found.compilation_config.compile_sizes,
        "keys": sorted(found.additional_config),
        "hash": found.compute_hash(),
        "aot": os.environ.get("VLLM_USE_AOT_COMPILE"),
        "environment": sorted(set(os.environ.items()) - set(environment.items())),
        "callers_dict_changed": arguments["additional_config"] != additional,
    }


def _model(models: dict[str, str], name: str) -> str:
    """A folder; those without weights are made on first use."""
    if name not in models:
        from transformers import AutoConfig

        kind, architecture = FOREIGN[name]
        model = AutoConfig.for_model(kind)
        model.architectures = [architecture]
        if name == "two modules":
            model.num_nextn_predict_layers = 2
        models[name] = f"{models['folder']}/{kind}"
        model.save_pretrained(models[name])
    return models[name]


if __name__ == "__main__":
    _main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "1")
