# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(backend="pcp")``, and when a captured graph is captured again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch import sharded as sharding
from pcp_passes.frontends.torch.backend import PcpBackend, pcp_backend
from pcp_passes.frontends.torch.executors import SimulatedExecutor
from pcp_passes.frontends.torch.fresh import FreshSpace
from pcp_passes.frontends.torch.options import TorchOptions
from tests.unit.frontends_torch.decoders import decoder, tokens

NAME = "pcp_under_test"


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    torch._dynamo.reset()
    with torch.no_grad():
        yield


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    torch._dynamo.register_backend(pcp_backend, name=NAME)


def backend(pcp: int = 2, **options: Any) -> PcpBackend:
    return PcpBackend(TorchOptions.parse(options), lambda: SimulatedExecutor(pcp))


def test_by_name_with_options_and_dynamic_sizes(group: None) -> None:
    model, ids = decoder(), tokens(12)
    compiled = torch.compile(model, backend=NAME, dynamic=True, options={"inner": "eager"})
    for count in (12, 7, 33):
        found = compiled(tokens(count))["logits"]
        torch.testing.assert_close(found, model(tokens(count))["logits"], rtol=0, atol=2e-5)
    with pytest.raises(ConfigError, match="unknown option 'layuot'"):
        torch.compile(decoder(), backend=NAME, dynamic=True, options={"layuot": "zigzag"})(ids)


def test_without_a_process_group() -> None:
    with pytest.raises(ConfigError, match=r"init_process_group\(\) first, or run all ranks in this process"):
        torch.compile(decoder(), backend=NAME, dynamic=True)(tokens(12))


@pytest.mark.parametrize("options", [{}, {"tokens": {"input_ids": 1}}])
def test_a_static_graph_is_refused_with_the_next_step(group: None, options: dict[str, Any]) -> None:
    with pytest.raises(Refusal, match="has no dynamic number of tokens") as error:
        torch.compile(decoder(), backend=NAME, options=options or None)(tokens(12))
    assert "dynamic=True), or @context_parallel" in str(error.value)
    assert ("input", "input_ids [1, 12]") in error.value.details


def test_a_static_graph_runs_whole_when_asked() -> None:
    used = backend(unknown="replicate")
    found = torch.compile(decoder(), backend=used)(tokens(12))["logits"]
    torch.testing.assert_close(found, decoder()(tokens(12))["logits"], rtol=0, atol=1e-5)
    assert used.replicated == ["no input of this graph has a dynamic size"] and not used.graphs


def test_wrong_names_are_said_in_the_refusal() -> None:
    with pytest.raises(Refusal, match=r"tokens names 'input_idz', but the graph reads input_ids\. Did you mean"):
        torch.compile(decoder(), backend=backend(tokens={"input_idz": 1}))(tokens(12))


def test_a_graph_without_token_inputs_runs_whole() -> None:
    used = backend(inner="eager")
    assert torch.compile(lambda x: x * 2, backend=used)(torch.tensor(3.0)) == 6
    assert used.replicated == ["no input that could hold tokens"]


def test_graph_breaks_give_graphs_that_each_return_all_tokens() -> None:
    model = decoder()

    def broken(ids: torch.Tensor) -> torch.Tensor:
        x = model.embed(ids)
        torch._dynamo.graph_break()
        return model.head(model.layers[0](x, *angles(ids)))

    def angles(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = torch.arange(ids.shape[1])[None, :, None] * model.frequencies
        return turned.cos()[:, None], turned.sin()[:, None]

    used = backend(tokens={"ids": 1})
    compiled = torch.compile(broken, backend=used)
    for count in (12, 33):
        ids = tokens(count)
        torch._dynamo.maybe_mark_dynamic(ids, 1)
        torch.testing.assert_close(compiled(ids), broken(ids), rtol=0, atol=2e-5)
    assert len(used.graphs) == 2 and used.compilations == 2


# -- captured again


def run_at(compiled: Any, count: int) -> torch.Tensor:
    ids = tokens(count)
    torch._dynamo.maybe_mark_dynamic(ids, 1)
    found: torch.Tensor = compiled(ids)["logits"]
    return found


def plant(monkeypatch: pytest.MonkeyPatch, limit: int = 64) -> None:
    """A rewrite whose result holds up to ``limit`` tokens only: it keeps that many rows, which is all of them."""
    rewrite = sharding.rewrite_tokens

    def planted(gm: fx.GraphModule, space: FreshSpace, *args: Any, **kwargs: Any) -> Any:
        made = rewrite(gm, space, *args, **kwargs)
        if space.tokens <= limit:
            (output,) = made.gm.graph.find_nodes(op="output")
            with made.gm.graph.inserting_before(output):
                kept = made.gm.graph.call_function(torch.ops.aten.slice.Tensor, (output.args[0][0], 1, 0, limit))
            kept.meta = dict(output.args[0][0].meta)
            output.args = ((kept,),)
            made.gm.recompile()
        return made

    monkeypatch.setattr(sharding, "rewrite_tokens", planted)


def test_a_prompt_beyond_a_guarded_length_is_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    model, used = decoder(), backend(tokens={"input_ids": 1})
    compiled = torch.compile(model, backend=used)
    for count, compilations in ((48, 1), (64, 1), (100, 2), (33, 2), (200, 2), (65, 2), (64, 2)):
        found = run_at(compiled, count)
        torch.testing.assert_close(found, model(tokens(count))["logits"], rtol=0, atol=2e-5)
        assert used.compilations == compilations, count
    assert len(used.graphs) == 1, "Dynamo was never asked again"


def test_without_our_guards_the_planted_graph_would_be_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage of the test above: nobody else enforces the guards of a fresh environment."""
    plant(monkeypatch)
    monkeypatch.setattr(FreshSpace, "broken_guards", lambda *_: ())
    used = backend(tokens={"input_ids": 1})
    compiled = torch.compile(decoder(), backend=used)
    run_at(compiled, 48)
    assert run_at(compiled, 100).shape[1] == 64 and used.compilations == 1


class Scaled(nn.Module):
    """Holds a Python float that a caller may change."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_a_float_that_changes_is_captured_again() -> None:
    model, used = Scaled(), backend(tokens={"x": 0})
    compiled = torch.compile(model, backend=used, dynamic=True)
    x = torch.ones(12, 4)
    for scale, compilations in ((0.5, 1), (0.25, 2), (0.5, 2)):
        model.scale = scale
        assert torch.equal(compiled(x), x * scale)
        assert used.compilations == compilations


def test_old_variants_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "MAX_VARIANTS", 2)
    model, used = Scaled(), backend(tokens={"x": 0})
    compiled = torch.compile(model, backend=used, dynamic=True)
    for scale in (0.5, 0.25, 0.125, 0.5):
        model.scale = scale
        assert torch.equal(compiled(torch.ones(6, 2)), torch.full((6, 2), scale))
    assert used.compilations == 4 and len(used.graphs[0].variants) == 2


def test_token_dimensions_that_differ_in_one_call() -> None:
    used = backend(tokens={"a": 0, "b": 0})
    compiled = torch.compile(lambda a, b: (a * 2, b * 2), backend=used, dynamic=True)
    with pytest.raises(ConfigError, match="a has 12 along dimension 0, b has 13 along dimension 0"):
        compiled(torch.ones(12), torch.ones(13))


class OneLength(nn.Module):
    """An op that nothing but our capture looks into: its shape rule compares the length with a constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pcp_test_backend.fixed(x)


def test_a_capture_for_one_length_is_refused_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_State, "compare", True)
    x = torch.ones(12, 4)
    torch._dynamo.mark_dynamic(x, 0)
    with pytest.raises(Refusal, match="holds for one length only") as error:
        torch.compile(OneLength(), backend=backend(tokens={"x": 0}))(x)
    assert error.value.details[0][1].startswith("T = 12")
    torch._dynamo.reset()
    used = backend(tokens={"x": 0}, unknown="replicate")
    assert torch.equal(torch.compile(OneLength(), backend=used)(x), x)


def test_dumps_are_numbered(tmp_path: Path) -> None:
    used = backend(tokens={"x": 0}, dump=str(tmp_path))
    compiled = torch.compile(Scaled(), backend=used, dynamic=True)
    compiled(torch.ones(12, 4))
    compiled(torch.ones(12, 5))
    folders = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("00-captured.txt"))
    assert folders == ["graph-0/sharded", "graph-1/sharded"]


class _State:
    compare = False


_LIBRARY = torch.library.Library("pcp_test_backend", "FRAGMENT")
_LIBRARY.define("fixed(Tensor x) -> Tensor")
_LIBRARY.impl("fixed", lambda x: x.clone(), "CompositeExplicitAutograd")


@torch.library.register_fake("pcp_test_backend::fixed", lib=_LIBRARY)
def _fixed(x: torch.Tensor) -> torch.Tensor:
    ours = str(x.shape[0]).startswith("sT")
    return x.new_empty(12 if ours and x.shape[0] == 12 else x.shape[0], *x.shape[1:])
