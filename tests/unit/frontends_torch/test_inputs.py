# SPDX-License-Identifier: Apache-2.0
"""What a Dynamo graph reads, and which of its sizes is the token count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch.capture import DynamoGraph, capture
from pcp_passes.frontends.torch.inputs import choose_tokens
from tests.unit.frontends_torch.decoders import decoder, tokens, traced


def read(function: Any, *args: Any, **options: Any) -> DynamoGraph:
    return traced(function, *args, **options)[0]


def test_inputs_are_called_as_the_user_calls_them() -> None:
    ids = tokens(12)
    graph = read(decoder(), ids, marked=[(ids, 1)])
    by_name = {given.source: given for given in graph.inputs}
    assert by_name["input_ids"].kind == "tensor" and not by_name["input_ids"].is_parameter
    assert by_name["layers.1.qkv.weight"].is_parameter and by_name["layers.1.qkv.weight"].size == (96, 32)
    assert by_name["frequencies"].is_parameter, "a buffer counts as a parameter"
    assert by_name["input_ids.size().1"].kind == "size"
    assert str(by_name["input_ids"].size[1]) == str(by_name["input_ids.size().1"].value)


def test_keyword_arguments_are_called_by_their_names() -> None:
    ids = tokens(12)
    graph = read(lambda **kwargs: kwargs["ids"] * 2, marked=[(ids, 1)], kwargs={"ids": ids})
    assert "ids" in {given.source for given in graph.inputs}


def test_python_floats_are_told_from_tensors() -> None:
    graph = read(decoder(), tokens(12), dynamic=True)
    assert {given.last_name for given in graph.inputs if given.kind == "float"} >= {"scale"}
    number = torch.tensor(3.0, dtype=torch.float64)
    graph = read(lambda x, y: x * y, torch.ones(4), number)
    assert [given.kind for given in graph.inputs] == ["tensor", "tensor"]


def test_the_only_dynamic_size_is_the_token_count() -> None:
    ids = tokens(12)
    choice = choose_tokens(read(decoder(), ids, marked=[(ids, 1)]).inputs)
    assert len(choice.symbols) == 1


def test_two_sizes_that_the_model_compares_are_one_symbol() -> None:
    ids, positions = tokens(12), torch.arange(12)[None]
    graph = read(decoder(), ids, positions, marked=[(ids, 1), (positions, 1)])
    assert len(choose_tokens(graph.inputs, {"input_ids": 1, "position_ids": -1}).symbols) == 1


def test_two_sizes_that_are_never_compared_are_both_the_token_count() -> None:
    left, right = torch.ones(12), torch.ones(12)
    graph = read(lambda a, b: (a * 2, b * 2), left, right, marked=[(left, 0), (right, 0)])
    with pytest.raises(ConfigError, match="2 sizes of this graph are dynamic, required one"):
        choose_tokens(graph.inputs)
    assert len(choose_tokens(graph.inputs, {"a": 0, "b": 0}).symbols) == 2


def test_several_candidates_are_listed_with_what_to_write() -> None:
    ids = tokens(12, batch=3)
    graph = read(decoder(), ids, marked=[(ids, 0), (ids, 1)])
    with pytest.raises(ConfigError) as error:
        choose_tokens(graph.inputs)
    assert "input_ids dim 0" in str(error.value) and "input_ids dim 1" in str(error.value)
    assert 'tokens={"input_ids": 1}' in str(error.value)
    (symbol,) = choose_tokens(graph.inputs, {"input_ids": 1}).symbols
    assert symbol == next(g for g in graph.inputs if g.source == "input_ids").size[1]


def test_a_static_graph_says_why() -> None:
    graph = read(decoder(), tokens(12))
    choice = choose_tokens(graph.inputs, {"input_ids": 1})
    assert not choice.symbols and choice.why_static == "input_ids dim 1 is the constant 12"
    assert choose_tokens(graph.inputs).why_static == "no input of this graph has a dynamic size"


@pytest.mark.parametrize("dim", [2, -3])
def test_a_dimension_that_is_not_there(dim: int) -> None:
    ids = tokens(12)
    with pytest.raises(ConfigError, match=rf"dimension {dim} of 'input_ids', which has 2: \[1, s"):
        choose_tokens(read(decoder(), ids, marked=[(ids, 1)]).inputs, {"input_ids": dim})


def test_one_static_and_one_dynamic_token_dimension() -> None:
    ids, other = tokens(12), torch.ones(4)
    graph = read(lambda a, b: (a * 2, b * 2), ids, other, marked=[(ids, 1)])
    with pytest.raises(ConfigError, match="b dim 0 is the constant 4, and others are dynamic"):
        choose_tokens(graph.inputs, {"a": 1, "b": 0})


def test_names_that_this_graph_does_not_read_are_left_to_another_graph() -> None:
    ids = tokens(12)
    graph = read(decoder(), ids, marked=[(ids, 1)])
    assert choose_tokens(graph.inputs, {"elsewhere": 3, "input_ids": 1}).symbols


def test_subclasses_of_tensors_are_refused_by_name() -> None:
    ids = torch.ones(12)
    pair = TwoTensor(torch.eye(4), torch.eye(4))
    graph, given = traced(lambda x, table: (x * 2, table + table), ids, pair, marked=[(ids, 0)])
    assert [given.kind for given in graph.inputs if given.last_name == "table"] == ["other"]
    with pytest.raises(Refusal, match="1 inputs of this graph are neither plain tensors nor numbers") as error:
        capture(graph, given, rows=6)
    assert ("input", "table") in error.value.details


def test_parameters_never_count_as_token_inputs() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.input_ids = nn.Parameter(torch.ones(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.input_ids

    x = torch.ones(5, 12)
    graph = read(Named(), x, marked=[(x, 0)])
    choice = choose_tokens(graph.inputs, {"input_ids": 0})
    assert choice.symbols == choose_tokens(graph.inputs).symbols
