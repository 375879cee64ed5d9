# SPDX-License-Identifier: Apache-2.0
"""``context_parallel``: shard the tokens of a model, a ``forward`` method or a function over the ranks of a group."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import pairwise
from typing import Any, TypeVar, overload

import torch
from torch import nn

from pcp_passes.errors import ConfigError, Refusal
from pcp_passes.frontends.torch.backend import PcpBackend
from pcp_passes.frontends.torch.executors import Executor, GroupExecutor
from pcp_passes.frontends.torch.options import TorchOptions

Function = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])


class ShardedCall:
    """A function compiled with our backend, whose token arguments are marked dynamic before each call.

    Args:
        function: what is compiled.
        signature: of the arguments, to find them by name.
        options: ``options.tokens`` names at least one argument.
        executor: who runs the graphs; by default one rank of the group that the options name.
        fullgraph: refuse a graph break instead of running what follows as another graph.
    """

    def __init__(
        self,
        function: Function,
        signature: inspect.Signature,
        options: TorchOptions,
        executor: Executor | None = None,
        *,
        fullgraph: bool = True,
    ) -> None:
        if not options.tokens:
            raise ConfigError(
                'context_parallel needs to know the token dimension of at least one argument: tokens={"input_ids": 1}.'
            )
        _require_parameters(signature, options.tokens)
        self.signature, self.options = signature, options
        make_executor = functools.cache(lambda: executor or GroupExecutor.of(options))
        self.backend = PcpBackend(options, make_executor, names_checked=True)
        self._compiled = torch.compile(function, backend=self.backend, fullgraph=fullgraph)

    @property
    def compilations(self) -> int:
        """How often a graph was captured, rewritten and prepared."""
        return self.backend.compilations

    @property
    def rows(self) -> torch.Tensor | None:
        """i64[M], the global token of each of this rank's rows in the last call; ``None`` before the first."""
        return self.backend.graphs[-1].rows if self.backend.graphs else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check and mark the token arguments, then run.

        Raises:
            ConfigError: no named argument was given, or their token dimensions do not exist or differ in size.
            Refusal: the model loops over values of a tensor, or cannot be sharded.
        """
        mark_tokens(self.signature, self.options.tokens, args, kwargs)
        self.backend.make_executor()  # its error belongs to this call; one met while compiling would be kept
        with torch.no_grad():  # also for Dynamo, which would make a second graph for the other mode
            try:
                return self._compiled(*args, **kwargs)
            except torch._dynamo.exc.UserError as error:
                if "data-dependent" not in str(error):
                    raise
                raise _no_graph(error) from error


def _no_graph(error: Exception) -> Refusal:
    """Refuse a loop or a branch over what a tensor holds, as Dynamo met it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    source = next((f"{place}: {code}" for place, code in reversed(list(pairwise(lines))) if 'File "' in place), "")
    return Refusal(
        "the model's Python code loops or branches over values of a tensor, so it has no graph of all tokens.",
        [
            ("found", lines[0].rpartition("(). ")[2]),
            *([("at", source)] if source else []),
            ("next", 'experts of transformers that loop: model.set_experts_implementation("grouped_mm"), its default;'),
            ("", "code of your own: compute for all tokens, with a mask, what the loop computes for some"),
        ],
    )


def _require_parameters(signature: inspect.Signature, tokens: Mapping[str, int]) -> None:
    parameters = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in tokens:
        if name not in parameters:
            near = get_close_matches(name, parameters, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"tokens names {name!r}, but the arguments are {', '.join(parameters)}.{hint}")


def mark_tokens(
    signature: inspect.Signature, tokens: Mapping[str, int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> int:
    """Tell Dynamo that the named sizes vary; the number of tokens of this call. An absent argument is left out.

    A size of 0 or 1 stays a constant, as PyTorch treats those: such a call runs whole on every rank.
    """
    sizes: dict[str, int] = {}
    for name, dim, tensor in _named(signature, tokens, args, kwargs):
        if not -tensor.dim() <= dim < tensor.dim():
            raise ConfigError(f"tokens names dimension {dim} of {name!r}, whose shape is {list(tensor.shape)}.")
        sizes[f"{name} dim {dim}"] = tensor.shape[dim]
        torch._dynamo.maybe_mark_dynamic(tensor, dim % tensor.dim())
    if not sizes:
        raise ConfigError(
            f"this call has none of the token arguments {', '.join(map(repr, tokens))}: required one of them, as a "
            "tensor."
        )
    if len(set(sizes.values())) > 1:
        found = ", ".join(f"{place} = {size}" for place, size in sizes.items())
        raise ConfigError(f"token dimensions differ in size: {found}. Give all the same tokens.")
    return next(iter(sizes.values()))


def _named(
    signature: inspect.Signature, tokens: Mapping[str, int], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, int, torch.Tensor]]:
    bound = signature.bind(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    for name, dim in tokens.items():
        tensor = bound.get(name)
        if isinstance(tensor, torch.Tensor):
            yield name, dim, tensor
        elif tensor is not None:
            raise ConfigError(f"tokens names {name!r}, which is a {type(tensor).__name__}; required a tensor or None.")


class ContextParallel(nn.Module):
    """A module whose tokens are sharded. Attributes that it does not have itself are those of ``module``.

    Attributes:
        module: the model, unchanged.
        sharded: the compiled call: compilations, graphs and rows.
    """

    def __init__(
        self, module: nn.Module, options: TorchOptions, executor: Executor | None = None, *, fullgraph: bool = True
    ) -> None:
        super().__init__()
        self.module = module
        self._signature = inspect.signature(module.forward)
        self.sharded = ShardedCall(_call_of(module), self._signature, options, executor, fullgraph=fullgraph)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result, as its own ``forward`` returns it."""
        positional, named = _by_name(self._signature, args, kwargs)
        return self.sharded(*positional, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


def _by_name(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """The same call with as many keyword arguments as possible: the graph's inputs are then called by their names."""
    names = []
    for parameter in signature.parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            break
        names.append(parameter.name)
    if len(args) > len(names):
        return list(args), dict(kwargs)
    return [], {**dict(zip(names, args, strict=False)), **kwargs}


def _call_of(self: nn.Module) -> Function:
    """A function that calls a module. Dynamo names what the module holds by this variable: ``self.layers.0``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    # Dynamo counts recompilations by code object, over all models that share one.
    return types.FunctionType(call.__code__.replace(), call.__globals__, "call", None, call.__closure__)


@overload
def context_parallel(target: nn.Module, /, *, fullgraph: bool = ..., **options: Any) -> ContextParallel: ...


@overload
def context_parallel(target: F, /, *, fullgraph: bool = ..., **options: Any) -> F: ...


@overload
def context_parallel(*, fullgraph: bool = ..., **options: Any) -> Callable[[F], F]: ...


def context_parallel(target: Any = None, /, *, fullgraph: bool = True, **options: Any) -> Any:
    """Shard the tokens of a model over the ranks of a process group.

    On a method or a function::

        class Decoder(nn.Module):
            @context_parallel(tokens={"input_ids": 1, "position_ids": 1})
            def forward(self, input_ids, position_ids): ...

    or on a model that is not one's own::

        model = context_parallel(model, tokens={"input_ids": 1})
        logits = model(**inputs).logits

    Every rank calls it with the same *global* arguments and gets the result of all tokens (``outputs="global"``), of
    its own rows (``"local"``; ``.rows`` says which) or of the last token (``"last"``). One compilation serves all
    lengths. Inference only: nothing is recorded for a backward pass.

    Args:
        target: a module, a method or a function; absent when used with arguments as a decorator.
        fullgraph: refuse a graph break.
        options: fields of :class:`~pcp_passes.frontends.torch.options.TorchOptions`; ``tokens`` is required.

    Raises:
        ConfigError: an option is unknown or wrong, or ``tokens`` names no argument.
    """
    parsed = TorchOptions.parse(options)
    if target is None:
        return functools.partial(_decorate, options=parsed, fullgraph=fullgraph)
    return _decorate(target, options=parsed, fullgraph=fullgraph)


def _decorate(target: Any, *, options: TorchOptions, fullgraph: bool) -> Any:
    if isinstance(target, nn.Module):
        return ContextParallel(target, options, fullgraph=fullgraph)
    if not callable(target) or isinstance(target, type):
        raise ConfigError(f"context_parallel takes a module, a method or a function; found {target!r}.")
    sharded = ShardedCall(target, inspect.signature(target), options, fullgraph=fullgraph)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        return sharded(*args, **kwargs)

    call.sharded = sharded  # type: ignore[attr-defined]
    return call
