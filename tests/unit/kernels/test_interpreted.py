# SPDX-License-Identifier: Apache-2.0
"""The child process that interprets kernels: it interprets, it hands back what went wrong, and it survives that."""

from __future__ import annotations

import os

import pytest
import torch

from pcp_kernels import device, specs, store
from tests.interpreted import ChildError, Interpreted

pytest.importorskip("triton")


def mode(values: torch.Tensor) -> tuple[str, str, torch.Tensor]:
    return (
        type(store.load(specs.OwnerSpec(topk=64), interpret=True).kernel).__name__,
        device.implementation(values),
        values,
    )


def refuse(number: int) -> None:
    raise ValueError(f"no {number}")


def die() -> None:
    os._exit(7)


def hang() -> None:
    import time

    time.sleep(600)


def process() -> int:
    return os.getpid()


def test_one_child_interprets_for_the_whole_module(interpreted: Interpreted) -> None:
    values = torch.arange(4).to(torch.float8_e4m3fn)
    kind, implementation, back = interpreted(mode, values)
    assert (kind, implementation) == ("InterpretedFunction", "interpreter")
    assert back.dtype == values.dtype and torch.equal(back.float(), values.float())
    assert interpreted(process) == interpreted(process) != os.getpid()


def test_what_is_raised_there_is_raised_here(interpreted: Interpreted) -> None:
    with pytest.raises(ChildError, match=r"(?s)refuse raised in the child:.*ValueError: no 3"):
        interpreted(refuse, 3)
    assert interpreted(process) > 0


def test_a_child_that_dies_or_hangs_is_replaced(interpreted: Interpreted) -> None:
    first = interpreted(process)
    with pytest.raises(ChildError, match="die: the child ended, exit code 7"):
        interpreted(die)
    second = interpreted(process)
    interpreted.timeout, usual = 0.5, interpreted.timeout
    with pytest.raises(TimeoutError, match=r"hang gave no answer in 0\.5 s"):
        interpreted(hang)
    interpreted.timeout = usual
    assert len({first, second, interpreted(process)}) == 3
