# SPDX-License-Identifier: Apache-2.0
"""Run functions of test modules where Triton interprets its kernels.

``TRITON_INTERPRET`` counts only if it is set before triton is imported, so the tests' own process cannot switch.
A module that asks for the fixture ``interpreted`` (see ``tests/unit/kernels/conftest.py``) gets one child process
with it set, which serves all its tests::

    def on_the_interpreter(x: torch.Tensor) -> torch.Tensor: ...   # in this or another test module, at top level

    def test_x(interpreted: Interpreted) -> None:
        out = interpreted(on_the_interpreter, x)
"""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

ROOT = Path(__file__).resolve().parents[1]


def _packed(value: object) -> bytes:
    """By torch: plain pickle cannot hold FP8 tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


class ChildError(AssertionError):
    """What the function raised in the child, with the child's traceback."""


class Interpreted:
    """A child process in which Triton interprets; started at the first call.

    Args:
        timeout: seconds for one call; after it the child is ended and the call raises.
    """

    def __init__(self, timeout: float = 120.0) -> None:
        self.timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Any = None

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """``function(*args, **kwargs)``, computed in the child; arguments and result are pickled.

        Raises:
            ChildError: the function raised, or the child died.
            TimeoutError: no answer in time.
        """
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._pipe.send_bytes(_packed((function.__module__, function.__qualname__, args, kwargs)))
        if not self._pipe.poll(self.timeout):
            self.close()
            raise TimeoutError(f"{function.__qualname__} gave no answer in {self.timeout} s")
        try:
            fine, answer = _unpacked(self._pipe.recv_bytes())
        except EOFError:
            assert self._process is not None
            raise ChildError(f"{function.__qualname__}: the child ended, exit code {self._process.wait(10)}") from None
        if not fine:
            raise ChildError(f"{function.__qualname__} raised in the child:\n{answer}")
        return answer  # type: ignore[no-any-return]

    def _start(self) -> None:
        self._pipe, theirs = Pipe()
        paths = [os.fspath(ROOT), os.fspath(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "PCP_KERNELS": "interpreter",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreted", str(theirs.fileno())],
            env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
        )  # fmt: skip
        theirs.close()

    def close(self) -> None:
        """End the child."""
        if self._process is not None:
            self._pipe.close()
            self._process.kill()
            self._process.wait(10)
            self._process = None


def _serve(pipe: Any) -> None:
    while True:
        try:
            module, name, args, kwargs = _unpacked(pipe.recv_bytes())
        except EOFError:
            return
        try:
            function: Any = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(_packed(answer))


if __name__ == "__main__":
    torch.set_num_threads(1)
    _serve(Connection(int(sys.argv[1])))
