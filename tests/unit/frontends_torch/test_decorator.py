# SPDX-License-Identifier: Apache-2.0
"""``context_parallel`` on modules, methods and functions, with all ranks in this process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import pcp_passes
from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch import decorator as decorators
from pcp_passes.frontends.torch.decorator import ContextParallel, ShardedCall, context_parallel, mark_tokens
from pcp_passes.frontends.torch.executors import SimulatedExecutor
from pcp_passes.frontends.torch.options import TorchOptions
from tests.unit.frontends_torch.decoders import Decoder, decoder, tokens

LENGTHS = (48, 64, 33, 100, 7, 2, 3)


def simulated(model: nn.Module, pcp: int = 2, **options: Any) -> ContextParallel:
    return pcp_passes.simulated(model, pcp, **{"tokens": {"input_ids": 1}, **options})


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("pcp", [2, 3, 4])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_all_lengths_from_one_capture(pcp: int, layout: str) -> None:
    model = decoder()
    sharded = simulated(model, pcp, layout=layout)
    for count in LENGTHS:
        found = sharded(tokens(count))["logits"]
        torch.testing.assert_close(found, model(tokens(count))["logits"], rtol=0, atol=2e-5)
    assert sharded.sharded.compilations == 1
    other = model(tokens(33, seed=1))["logits"]
    assert (sharded(tokens(33))["logits"] - other).abs().max() > 1e-2, "the comparison can fail"


def test_a_broken_restore_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: the plan's restore index is rotated by one."""
    from pcp_passes.frontends.torch import plan as plans

    build = plans.build_plan

    def rotated(*args: Any) -> plans.TokenPlan:
        plan = build(*args)
        return plans.TokenPlan(plan.rows, plan.restore.roll(1), plan.real)

    monkeypatch.setattr(plans, "build_plan", rotated)
    model = decoder()
    found = simulated(model)(tokens(33))["logits"]
    assert (found - model(tokens(33))["logits"]).abs().max() > 1e-2


def test_arguments_by_position_and_by_name() -> None:
    model, ids, positions = decoder(), tokens(12), torch.arange(12)[None]
    sharded = simulated(model, tokens={"input_ids": 1, "position_ids": 1})
    wanted = model(ids, positions, double=True)["logits"]
    for found in (
        sharded(ids, positions, double=True),
        sharded(input_ids=ids, position_ids=positions, double=True),
        sharded(ids, position_ids=positions, double=True),
    ):
        torch.testing.assert_close(found["logits"], wanted, rtol=0, atol=2e-5)
    assert sharded.sharded.compilations == 1, "one graph, however the arguments are given"
    sharded(ids)  # position_ids left out: another graph


def test_one_token_runs_whole_on_every_rank() -> None:
    model = decoder()
    sharded = simulated(model)
    torch.testing.assert_close(sharded(tokens(1))["logits"], model(tokens(1))["logits"])
    assert sharded.sharded.compilations == 0 and sharded.sharded.backend.replicated == ["one token"]
    torch.testing.assert_close(sharded(tokens(9))["logits"], model(tokens(9))["logits"], rtol=0, atol=2e-5)
    assert sharded.sharded.compilations == 1


def test_another_batch_size_is_another_capture() -> None:
    model = decoder()
    sharded = simulated(model)
    for batch in (1, 3, 4, 3):
        found = sharded(tokens(12, batch))["logits"]
        torch.testing.assert_close(found, model(tokens(12, batch))["logits"], rtol=0, atol=2e-5)
    assert sharded.sharded.compilations == 3


@dataclass
class Output:
    """A result class, as transformers has them."""

    logits: torch.Tensor
    count: int


class Wrapped(nn.Module):
    """Returns a dataclass, and holds attributes that a caller reads."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder()
        self.config = {"hidden": 32}

    def forward(self, **inputs: Any) -> Output:
        return Output(self.decoder(inputs["input_ids"])["logits"], inputs["input_ids"].shape[1])


def test_result_classes_and_attributes_pass_through() -> None:
    sharded = simulated(Wrapped())
    found = sharded(input_ids=tokens(12))
    assert isinstance(found, Output) and found.count == 12
    torch.testing.assert_close(found.logits, decoder()(tokens(12))["logits"], rtol=0, atol=2e-5)
    assert sharded.config == {"hidden": 32}
    with pytest.raises(AttributeError, match="absent"):
        _ = sharded.absent


def test_only_the_last_row() -> None:
    model = decoder()
    found = simulated(model, outputs="last")(tokens(33))["logits"]
    torch.testing.assert_close(found, model(tokens(33))["logits"][:, -1:], rtol=0, atol=2e-5)


def test_gradients_are_off() -> None:
    found = simulated(decoder().requires_grad_(True))(tokens(12))["logits"]
    assert not found.requires_grad


def test_inference_mode() -> None:
    model = decoder()
    sharded = simulated(model)
    with torch.inference_mode():
        found = sharded(tokens(12))["logits"]
    torch.testing.assert_close(found, model(tokens(12))["logits"], rtol=0, atol=2e-5)


def test_models_do_not_share_a_recompilation_limit() -> None:
    for _ in range(10):
        model = nn.Linear(4, 4)
        sharded = ContextParallel(model, TorchOptions.parse({"tokens": {"input": 0}}), SimulatedExecutor(2))
        x = torch.randn(6, 4)
        torch.testing.assert_close(sharded(x), model(x).detach())


def test_a_method_and_a_function(group: dist.ProcessGroup) -> None:
    class Model(Decoder):
        @context_parallel(tokens={"input_ids": 1}, inner="eager")
        def forward(self, input_ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
            return super().forward(input_ids)["logits"] * scale

    torch.manual_seed(0)
    model = Model().eval().requires_grad_(False)
    wanted = decoder()(tokens(12))["logits"]
    torch.testing.assert_close(model(tokens(12), scale=2.0), wanted * 2, rtol=0, atol=2e-5)

    @context_parallel(tokens={"ids": 1}, inner="eager")
    def logits(ids: torch.Tensor, *, scale: float = 1.0) -> Any:
        """Documented."""
        return model_.forward(ids)["logits"] * scale

    model_ = decoder()
    torch.testing.assert_close(logits(tokens(12), scale=3.0), wanted * 3, rtol=0, atol=2e-5)
    assert logits.__doc__ == "Documented." and logits.sharded.compilations == 1


def test_local_outputs_say_which_rows_they_are(group: dist.ProcessGroup) -> None:
    model = decoder()
    sharded = context_parallel(model, tokens={"input_ids": 1}, outputs="local", inner="eager")
    assert sharded.sharded.rows is None
    found = sharded(tokens(12))["logits"]
    rows = sharded.sharded.rows
    torch.testing.assert_close(found, model(tokens(12))["logits"].index_select(1, rows), rtol=0, atol=2e-5)


def test_inductor_serves_all_lengths_from_one_compilation(group: dist.ProcessGroup) -> None:
    model = decoder(1)
    sharded = context_parallel(model, tokens={"input_ids": 1})
    for count in (48, 33, 7):
        torch.testing.assert_close(sharded(tokens(count))["logits"], model(tokens(count))["logits"], rtol=0, atol=2e-5)
    assert sharded.sharded.compilations == 1


def test_values_that_were_assumed_are_checked_on_each_call() -> None:
    """Positions that count from 0 let a mask become positions; others need the mask as it was."""

    def visible(q: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        mask = position_ids[:, :, None] >= position_ids[:, None, :]
        return nn.functional.scaled_dot_product_attention(q[:, None], q[:, None], q[:, None], mask[:, None])[:, 0]

    sharded = ShardedCall(
        visible, inspect.signature(visible), TorchOptions.parse({"tokens": {"q": 1, "position_ids": 1}}),
        SimulatedExecutor(2),
    )  # fmt: skip
    q = torch.randn(1, 12, 8)
    counting, reversed_ = torch.arange(12)[None], torch.arange(12).flip(0)[None]
    for positions in (counting, reversed_, counting, reversed_):
        torch.testing.assert_close(sharded(q, positions), visible(q, positions), rtol=0, atol=2e-5)
    (graph,) = sharded.backend.graphs
    assert [len(variant.assumed) for variant in graph.variants] == [0, 1]
    assert sharded.compilations == 2, "the second kind of positions was captured once"
    assert (visible(q, counting) - visible(q, reversed_)).abs().max() > 1e-2


# -- what a call is told


SIGNATURE = inspect.signature(Decoder.forward)


def test_marking() -> None:
    ids = tokens(12)
    assert mark_tokens(SIGNATURE, {"input_ids": -1, "position_ids": 1}, (None, ids), {}) == 12
    assert ids._dynamo_weak_dynamic_indices == {1}


@pytest.mark.parametrize(
    "named, kwargs, said",
    [
        ({"input_ids": 2}, {}, r"names dimension 2 of 'input_ids', whose shape is \[1, 12\]"),
        ({"input_ids": -3}, {}, "names dimension -3"),
        ({"position_ids": 1}, {}, "this call has none of the token arguments 'position_ids'"),
        ({"position_ids": 1}, {"position_ids": 7}, "'position_ids', which is a int; required a tensor or None"),
        (
            {"input_ids": 1, "position_ids": 0}, {"position_ids": torch.arange(5)},
            "token dimensions differ in size: input_ids dim 1 = 12, position_ids dim 0 = 5",
        ),
    ],
)  # fmt: skip
def test_what_a_wrong_call_is_told(named: dict[str, int], kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulated(decoder(), tokens=named)(tokens(12), **kwargs)


def test_what_a_wrong_decoration_is_told() -> None:
    with pytest.raises(ConfigError, match=r"tokens names 'input_id', .* Did you mean 'input_ids'\?"):
        context_parallel(decoder(), tokens={"input_id": 1})
    with pytest.raises(ConfigError, match="needs to know the token dimension"):
        context_parallel(decoder())
    with pytest.raises(ConfigError, match="unknown option 'token'"):
        context_parallel(decoder(), token={"input_ids": 1})
    with pytest.raises(ConfigError, match="takes a module, a method or a function; found <class"):
        context_parallel(Decoder, tokens={"input_ids": 1})


def test_without_a_process_group_the_error_ends_when_there_is_one() -> None:
    model = decoder()
    sharded = context_parallel(model, tokens={"input_ids": 1}, inner="eager")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"torch\.distributed, which is not initialised"):
            sharded(tokens(12))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.testing.assert_close(sharded(tokens(12))["logits"], model(tokens(12))["logits"], rtol=0, atol=2e-5)
    finally:
        dist.destroy_process_group()


class Fixed(nn.Module):
    """Compares its length with a constant, which makes the graph one for that length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.shape[1] == 12 else x


def test_a_length_compared_with_a_constant_is_refused_with_the_reason() -> None:
    x = torch.randn(1, 12, 4)
    with pytest.raises(Refusal, match="has no dynamic number of tokens") as error:
        simulated(Fixed(), tokens={"x": 1})(x)
    assert ("found", "x dim 1 is the constant 12") in error.value.details
    assert "it compares its length with a constant" in str(error.value)
    assert torch.equal(simulated(Fixed(), tokens={"x": 1}, unknown="replicate")(x), x * 2)


def test_code_objects_are_a_models_own() -> None:
    first, second = (decorators._call_of(decoder()) for _ in range(2))
    assert first.__code__ is not second.__code__


class Counting(nn.Module):
    """Writes a buffer in ``forward``: what every rank computes alike."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.sum(0))
        return x * self.seen


def test_a_buffer_written_by_the_model_holds_its_new_value() -> None:
    alone, model = Counting(), Counting()
    sharded = pcp_passes.simulated(model, 3, tokens={"x": 0})
    for count in (12, 7):
        x = torch.randn(count, 3)
        torch.testing.assert_close(sharded(x), alone(x))
        torch.testing.assert_close(model.seen, alone.seen)
    assert bool(model.seen.abs().sum() > 0)
