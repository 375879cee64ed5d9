# SPDX-License-Identifier: Apache-2.0
"""Kinds of layers, and a model with one layer of each.

Decoders repeat a few kinds of layers: capturing one of each and multiplying costs seconds where a full capture costs
minutes. Two layers are of one kind when their modules have the same classes, sizes and settings *and* every per-layer
list of the configuration has the same entry for both. A setting that is the layer's own number says nothing.

The kept layers stay in the model's order, and of each kind the first is kept: a layer that reuses what an earlier one
made (GLM's shared top-k indices) comes after one that makes it. The outer layers are kinds of their own: what the first
needs whole it may compute from the token numbers, and where only the last token's logits leave, the last layer computes
only that token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

Setting = tuple[str, str, Any]
"""Module within the layer, name and value of one setting."""

_NUMBERED = re.compile(r"layer|idx|index")


@dataclass(frozen=True)
class LayerKind:
    """Layers that are alike.

    Attributes:
        label: what distinguishes the kind, in the configuration's words.
        layers: their numbers in the model, ascending.
    """

    label: str
    layers: tuple[int, ...]

    @property
    def times(self) -> int:
        """How often the kind occurs."""
        return len(self.layers)


@dataclass(frozen=True)
class LayerStack:
    """The repeated layers of a model.

    Attributes:
        path: dotted name of the list of layers; empty for a model that has none.
        kinds: in order of first occurrence.
    """

    path: str
    kinds: tuple[LayerKind, ...]

    def each_apart(self) -> LayerStack:
        """The same layers with a kind for each of them."""
        apart = [LayerKind(f"{number}: {kind.label}", (number,)) for kind in self.kinds for number in kind.layers]
        return LayerStack(self.path, tuple(sorted(apart, key=lambda kind: kind.layers)))

    def captured(self) -> tuple[int, ...]:
        """The layers that stand for their kinds, by their numbers in the model."""
        return tuple(kind.layers[0] for kind in self.kinds)

    def every_transition(self) -> tuple[int, ...]:
        """Layers, ascending, of which each two neighbours are of kinds that are neighbours in the model, for all such.

        What lies between two layers, or reaches over their border, is so captured at least once. With kinds
        ``a b b b c c c`` these are layers 0, 1, 2, 4, 5: the pairs a-b, b-b, b-c and c-c.
        """
        kind = {number: kind.label for kind in self.kinds for number in kind.layers}
        pairs = [(kind[number], kind[number + 1]) for number in range(len(kind) - 1)]
        kept, covered = [0], set[tuple[str, str]]()
        for number, pair in enumerate(pairs):
            if pair in covered:
                continue
            while kind[kept[-1]] != kind[number]:  # walk on to a layer from which this one can be left out
                kept.append(kept[-1] + 1)
            kept.append(number + 1)
            covered.update((kind[a], kind[b]) for a, b in pairwise(kept))
        return tuple(kept)

    def number_in(self, path: str) -> int | None:
        """The layer's number in a module path or parameter name; ``None`` for what is outside all layers."""
        found = re.search(rf"(?:^|\.){re.escape(self.path)}\.(\d+)(?=\.|$)", path) if self.path else None
        return int(found.group(1)) if found else None

    def within(self, path: str) -> str:
        """A module path as seen from its layer: ``self_attn.q_proj``."""
        return re.sub(rf"^.*?(?:^|\.){re.escape(self.path)}\.\d+\.?", "", path) if self.path else path


def find_stack(model: nn.Module, config: Any) -> LayerStack:
    """The layers of a model and their kinds. A model without one list of ``num_hidden_layers`` has no stack."""
    count = getattr(config, "num_hidden_layers", None)
    lists = [
        (name, held) for name, held in model.named_modules() if isinstance(held, nn.ModuleList) and len(held) == count
    ]
    lists = [(name, held) for name, held in lists if not any(name.startswith(f"{other}.") for other, _ in lists)]
    if len(lists) != 1 or not count:
        return LayerStack("", ())
    path, layers = lists[0]
    per_layer = _per_layer(config, count)
    settings = [_settings(layer) for layer in layers]
    own = _own_numbers(settings)
    entries = [tuple(str(held[index]) for held in per_layer.values()) for index in range(count)]
    groups: dict[Any, list[int]] = {}
    for index in range(count):
        told = frozenset(setting for setting in settings[index] if setting[:2] not in own)
        groups.setdefault((entries[index], told), []).append(index)
    kinds: list[LayerKind] = []
    for label, members in zip(_labels(list(groups)), groups.values(), strict=True):
        inner = tuple(number for number in members if 0 < number < count - 1)
        kinds += [LayerKind(label, inner)] if inner else []
        outer = sorted(set(members) - set(inner))
        kinds += [LayerKind(f"{label}, {'first' if number == 0 else 'last'}", (number,)) for number in outer]
    return LayerStack(path, tuple(sorted(kinds, key=lambda kind: kind.layers[0])))


def keep_one_of_each(model: nn.Module, config: Any, stack: LayerStack) -> None:
    """Leave one layer of each kind in ``model``; ``config``, which it reads while it runs, is changed to match."""
    keep_layers(model, config, stack, stack.captured())


def keep_layers(model: nn.Module, config: Any, stack: LayerStack, kept: Sequence[int]) -> None:
    """Leave only the layers with these numbers, in their order."""
    layers = model.get_submodule(stack.path)
    assert isinstance(layers, nn.ModuleList)
    count = len(layers)
    own = _own_numbers([_settings(layer) for layer in layers])
    per_layer = _per_layer(config, count)
    parent, _, name = stack.path.rpartition(".")
    chosen = [layers[index] for index in kept]
    for place, (number, layer) in enumerate(zip(kept, chosen, strict=True)):
        modules = dict(layer.named_modules())
        for module, setting in own:
            if module in modules and getattr(modules[module], setting, None) == number:
                setattr(modules[module], setting, place)
    setattr(model.get_submodule(parent), name, nn.ModuleList(chosen))
    config.num_hidden_layers = len(kept)
    for key, held in per_layer.items():
        setattr(config, key, [held[index] for index in kept])


def _per_layer(config: Any, count: int) -> dict[str, Sequence[Any]]:
    """The lists of a configuration that have one entry for each layer."""
    plain = config.to_dict()
    return {
        key: held
        for key, held in sorted(plain.items())
        if isinstance(held, (list, tuple)) and len(held) == count and hasattr(config, key)
    }


def _settings(layer: nn.Module) -> set[Setting]:
    """Classes, sizes and plain attributes of a layer. Fractions are left out: they scale values, not work."""
    found: set[Setting] = set()
    for name, module in layer.named_modules():
        found.add((name, "class", type(module).__name__))
        for key, held in vars(module).items():
            if not key.startswith("_") and isinstance(held, (int, str, bool, type(None))):
                found.add((name, key, held))
        for key, parameter in module.named_parameters(recurse=False):
            found.add((name, key, (tuple(parameter.shape), str(parameter.dtype))))
    return found


def _own_numbers(settings: Sequence[set[Setting]]) -> set[tuple[str, str]]:
    """Settings that are named like a layer's number, and are it in every layer that has them."""
    held_by: dict[tuple[str, str], set[bool]] = {}
    for number, one in enumerate(settings):
        for module, key, held in one:
            if _NUMBERED.search(key) and isinstance(held, int) and not isinstance(held, bool):
                held_by.setdefault((module, key), set()).add(held == number)
    return {which for which, equal in held_by.items() if equal == {True}}


def _labels(groups: Sequence[tuple[tuple[str, ...], frozenset[Setting]]]) -> list[str]:
    """Words for each group: entries of the configuration that vary, then whatever else is needed to tell them apart."""
    width = len(groups[0][0])
    varying = [at for at in range(width) if len({entries[at] for entries, _ in groups}) > 1]
    labels = [" ".join(entries[at] for at in varying) for entries, _ in groups]
    if len(set(labels)) < len(labels):
        classes = [{(m, held) for m, key, held in told if key == "class" and m.count(".") == 0} for _, told in groups]
        shared = set.intersection(*classes)
        extra = [" ".join(str(held) for _, held in sorted(one - shared)) for one in classes]
        labels = [" ".join(filter(None, pair)) for pair in zip(labels, extra, strict=True)]
    seen: dict[str, int] = {}
    unique = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        name = label or "layer"
        unique.append(name if seen[label] == 1 else f"{name} #{seen[label]}")
    return unique
