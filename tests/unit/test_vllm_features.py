# SPDX-License-Identifier: Apache-2.0
"""Latent attention on CPU, block drafters and KV producers: what of them needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import dspark, kv_transfer, mla_cpu, runtime
from pcp_passes.options import PcpOptions


class Platform:
    """vLLM's CPU platform, as far as latent attention goes."""

    @classmethod
    def check_and_update_config(cls, config: Any) -> None:
        config.scheduler_config.async_scheduling = config.asynchronous
        if config.model_config is not None and config.model_config.use_mla:
            config.scheduler_config.enable_chunked_prefill = False
            config.scheduler_config.max_num_batched_tokens = 2048
            config.cache_config.enable_prefix_caching = False


def configuration(*, mla: bool = True, ours: bool = True, asynchronous: bool = False) -> Any:
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True, max_num_batched_tokens=64),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        model_config=SimpleNamespace(use_mla=mla),
        additional_config={"pcp_passes": {}} if ours else {},
        asynchronous=asynchronous,
    )


def settled(config: Any) -> tuple[bool, int, bool]:
    platform: Any = type("CpuPlatform", (Platform,), dict(vars(Platform)))
    module: Any = SimpleNamespace(CpuPlatform=platform)
    mla_cpu.keep_chunked_prefill(module)
    mla_cpu.keep_chunked_prefill(module)
    platform.check_and_update_config(config)
    scheduler = config.scheduler_config
    return (
        scheduler.enable_chunked_prefill,
        scheduler.max_num_batched_tokens,
        config.cache_config.enable_prefix_caching,
    )


def test_latent_attention_keeps_what_was_asked_for() -> None:
    assert settled(configuration()) == (True, 64, True)


def test_the_platform_has_its_way_without_us_and_with_a_cursor_that_runs_ahead() -> None:
    assert settled(configuration(ours=False)) == (False, 2048, False)
    assert settled(configuration(asynchronous=True)) == (False, 2048, False)
    assert settled(configuration(mla=False)) == (True, 64, True)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> runtime.Runtime:
    found = runtime.Runtime(PcpOptions(), pcp=2, rank=0)
    monkeypatch.setattr(runtime, "_current", found)
    return found


def speculator(pcp: int) -> Any:
    parallel = SimpleNamespace(prefill_context_parallel_size=pcp)
    return SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))


def test_a_block_drafter_runs_alone(current: runtime.Runtime) -> None:
    roles = []
    dspark.around_block_forward(lambda drafter: roles.append(current.role), speculator(1))
    assert (roles, current.role) == (["alone"], "target")


def test_a_block_drafter_of_a_group_is_refused(current: runtime.Runtime) -> None:
    with pytest.raises(ConfigError, match="prefill_context_parallel_size=2; it runs whole"):
        dspark.around_block_forward(lambda drafter: None, speculator(2))


def test_states_are_restored_together() -> None:
    calls = []

    def restore(rows: torch.Tensor) -> torch.Tensor:
        calls.append(rows.shape)
        return rows.flip(0)

    states = [torch.randn(3, 2), torch.randn(3, 5)]
    for found, state in zip(dspark.restore_together(restore, states), states, strict=True):
        assert torch.equal(found, state.flip(0))
    assert calls == [(3, 7)]
    assert len(dspark.restore_together(restore, states[:1])) == 1
    assert calls[1:] == [(3, 2)]


class Connector:
    """Notes what is published."""

    def __init__(self) -> None:
        self.published: list[tuple[str, int]] = []

    def save_kv_layer(self, layer_name: str, kv_layer: int, attn_metadata: object) -> None:
        self.published.append((layer_name, kv_layer))

    def wait_for_save(self) -> None:
        self.waited = len(self.published)


def one_step(active: Any) -> list[tuple[str, int]]:
    """A target of two layers, then two passes of a drafter; what was published before the step's end."""
    connector = active.kv_connector
    kv_transfer.around_pre_forward(lambda active: None, active)
    for layer, state in (("t0", 1), ("t1", 1), ("d", 1), ("d", 2)):
        connector.save_kv_layer(layer, state, None)
    before = list(connector.published)
    connector.wait_for_save()
    return before


def test_layers_are_published_once_at_the_end_of_the_step(current: runtime.Runtime) -> None:
    connector = Connector()
    for _ in range(2):
        connector.published = []
        assert one_step(SimpleNamespace(kv_connector=connector)) == []
        assert connector.published == [("t0", 1), ("t1", 1), ("d", 2)]
        assert connector.waited == 3


def test_one_rank_publishes(current: runtime.Runtime) -> None:
    current.rank = 1
    connector = Connector()
    one_step(SimpleNamespace(kv_connector=connector))
    assert connector.published == []


def test_what_a_failed_step_left_is_not_published(current: runtime.Runtime) -> None:
    connector = Connector()
    active = SimpleNamespace(kv_connector=connector)
    kv_transfer.around_pre_forward(lambda active: None, active)
    connector.save_kv_layer("stale", 0, None)
    one_step(active)
    assert ("stale", 0) not in connector.published


def test_a_connector_is_left_alone_on_one_rank(current: runtime.Runtime) -> None:
    current.pcp = 1
    assert len(one_step(SimpleNamespace(kv_connector=Connector()))) == 4


@pytest.mark.parametrize(
    ("transfer", "fragment"),
    [
        (None, None),
        (("ExampleConnector", "kv_producer", None), None),
        (("Mine", "kv_producer", "my.module"), None),
        (("NixlConnector", "kv_producer", None), "KV transfer through NixlConnector"),
        (("ExampleConnector", "kv_consumer", None), "kv_role='kv_consumer'"),
        (("ExampleConnector", "kv_both", None), "kv_role='kv_both'"),
        (("ExampleConnector", "kv_producer", None, 2), "over pipeline_parallel_size=2 stages"),
    ],
)
def test_refusals(transfer: tuple[Any, ...] | None, fragment: str | None) -> None:
    transfer, stages = (transfer[:3], transfer[3]) if transfer and len(transfer) > 3 else (transfer, 1)
    names = ("kv_connector", "kv_role", "kv_connector_module_path")
    config = None if transfer is None else SimpleNamespace(**dict(zip(names, transfer, strict=True)))
    parallel = SimpleNamespace(pipeline_parallel_size=stages)
    found = kv_transfer.refusal(SimpleNamespace(kv_transfer_config=config, parallel_config=parallel))
    assert (found is None) if fragment is None else (found is not None and fragment in found)
