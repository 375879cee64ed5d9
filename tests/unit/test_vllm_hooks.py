# SPDX-License-Identifier: Apache-2.0
"""The parts of the vLLM front end that need no vLLM: import hooks, loggers, a queue's writer that can be given up."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pcp_passes.frontends.vllm import config, executor, imports, placement, plugin


@pytest.fixture
def module_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module that can be imported once."""
    (tmp_path / "pcp_hooked_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "pcp_hooked_module"
    sys.modules.pop("pcp_hooked_module", None)
    imports._finder.around.pop("pcp_hooked_module", None)
    imports._finder.after.pop("pcp_hooked_module", None)


def test_a_module_is_changed_when_it_is_imported_and_not_before(module_name: str) -> None:
    imports.after_import(module_name, lambda module: setattr(module, "value", 2))
    assert module_name not in sys.modules
    assert __import__(module_name).value == 2


def test_a_module_that_is_there_is_changed_at_once(module_name: str) -> None:
    module = __import__(module_name)
    imports.after_import(module_name, lambda found: setattr(found, "value", 3))
    assert module.value == 3


def test_several_hooks_run_in_order_around_and_after(module_name: str) -> None:
    seen: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        seen.append("enter")
        yield
        seen.append("exit")

    def note(text: str) -> imports.After:
        return lambda module: seen.append(f"{text} {isinstance(module, ModuleType)}")

    imports.around_import(module_name, context)
    imports.after_import(module_name, note("first"))
    imports.after_import(module_name, note("second"))
    __import__(module_name)
    assert seen == ["enter", "exit", "first True", "second True"]


class Queue:
    """A ring buffer with ``free`` blocks and no reader."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.shutting_down = False
        self.timeouts: list[float | None] = []
        self.messages: list[object] = []

    def enqueue(self, message: object, timeout: float | None = None) -> None:
        self.timeouts.append(timeout)
        if not self.free:
            # What another thread does while this one waits: the executor is shut down at the third look.
            self.shutting_down = len(self.timeouts) >= 3
            raise TimeoutError
        self.free -= 1
        self.messages.append(message)


def test_a_message_is_written_once() -> None:
    queue = Queue(free=2)
    send = executor.interruptible(queue)
    send("a")
    send("b", 5.0)
    assert queue.messages == ["a", "b"]
    assert queue.timeouts == [executor.LOOK_S, 5.0]


def test_a_writer_gives_up_when_the_queue_is_shut_down() -> None:
    queue = Queue(free=0)
    with pytest.raises(RuntimeError, match="a worker was lost"):
        executor.interruptible(queue)("a")
    assert len(queue.timeouts) == 3
    assert queue.messages == []


def test_a_timeout_that_was_asked_for_is_kept() -> None:
    with pytest.raises(TimeoutError):
        executor.interruptible(Queue(free=0))("a", 1.0)


@pytest.mark.parametrize("own, root, heard", [(False, False, True), (True, False, False), (False, True, False)])
def test_our_loggers_speak_where_vllm_s_do(own: bool, root: bool, heard: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM gives handlers and a level to its own loggers alone; a user's own set-up stays as it is."""
    told, other = logging.NullHandler(), logging.NullHandler()
    for name, handlers in (("vllm", [told]), ("pcp_passes", [other] if own else []), ("", [other] if root else [])):
        monkeypatch.setattr(logging.getLogger(name), "handlers", handlers)
    monkeypatch.setattr(logging.getLogger("vllm"), "level", logging.INFO)
    monkeypatch.setattr(logging.getLogger("pcp_passes"), "level", logging.NOTSET)
    monkeypatch.setattr(logging.getLogger("pcp_passes"), "propagate", True)
    plugin.log_as_vllm_does()
    assert logging.getLogger("pcp_passes").propagate != heard, "said once, whatever the root logger is given later"
    assert (logging.getLogger("pcp_passes").handlers == [told]) == heard
    assert (logging.getLogger("pcp_passes").level == logging.INFO) == heard


def _reads_more(args: Any, local_rank: int) -> list[int]:
    return list(range(args.of_a_later_release))


@pytest.mark.parametrize("known", [{"_build_device_ids": _reads_more}, {"another_name": _reads_more}])
def test_a_launcher_of_another_shape_is_imported_as_it_is(known: dict[str, Any]) -> None:
    """It is imported by every `vllm serve` of several replicas, also by those that do not ask for us."""
    module: Any = SimpleNamespace(**known)
    placement.count_pcp(module)
    assert vars(module) == known


def test_an_additional_config_that_is_no_mapping_is_not_ours() -> None:
    """vLLM takes any object that has a hash."""
    assert config.prepare(SimpleNamespace(additional_config=object())) is None
