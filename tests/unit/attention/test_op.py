# SPDX-License-Identifier: Apache-2.0
"""``pcp::attend`` as an operator: schema, fakes, compilation, what it counts, what it refuses, what it costs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pcp_passes.attention import attend, attend_op, attend_reference, blocks, op
from pcp_passes.errors import ConfigError


def operands(rows: int = 6, keys: int = 10, **kw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, rows, 8, **kw), torch.randn(1, 2, keys, 8, **kw), torch.randn(1, 2, keys, 8, **kw)
    return q, k, v, torch.arange(keys - rows, keys)


@pytest.mark.parametrize(
    "options",
    [{}, {"left": 3}, {"right": -1, "chunk": 4}, {"softcap": 2.0, "sinks": torch.ones(4), "slopes": torch.ones(4)}],
    ids=["causal", "window", "chunk", "softcap"],
)
def test_opcheck(options: dict[str, Any]) -> None:
    torch.library.opcheck(attend_op, operands(), {"scale": 0.3, **options})


def test_the_fake_has_the_layout_of_the_result() -> None:
    q, k, v, positions = operands()
    v = torch.randn(1, 2, 10, 12)
    real = attend(q, k, v, positions)
    with FakeTensorMode() as mode:
        fake = attend(*(mode.from_tensor(x) for x in (q, k, v, positions)))
    assert fake.shape == real.shape == (1, 4, 6, 12)
    assert fake.stride() == real.stride()
    assert real.transpose(1, 2).is_contiguous()


def test_the_fake_adds_no_guard_on_rows_or_keys() -> None:
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)

    def dynamic(x: torch.Tensor, dim: int) -> torch.Tensor:
        sizes = [DimDynamic.DYNAMIC if d == dim else DimDynamic.STATIC for d in range(x.dim())]
        return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    q, k, v, positions = operands()
    with mode:
        tensors = dynamic(q, 2), dynamic(k, 2), dynamic(v, 2), dynamic(positions, 0)
        guards = len(env.guards)
        result = attend(*tensors)
    assert str(result.shape[2]) == str(tensors[0].shape[2])
    assert [str(guard.expr) for guard in env.guards[guards:]] == []


def test_one_compile_serves_all_rows_and_keys() -> None:
    torch._dynamo.reset()

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = attend(q * 2, k + 1, v, positions, left=5)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1) + 1

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = attend_reference(q * 2, k + 1, v, positions, scale=8**-0.5, left=5)
        return out.transpose(1, 2).reshape(out.shape[0], out.shape[2], -1) + 1

    compiled = torch.compile(model, dynamic=True, fullgraph=True)
    for count, (rows, keys) in enumerate([(6, 10), (9, 33), (40, 200)]):
        tensors = operands(rows, keys)
        with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile" if count else "default"):
            torch.testing.assert_close(compiled(*tensors), expected(*tensors), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("value_size", [8, 12])
def test_flops_are_those_of_sdpa(value_size: int) -> None:
    q, k, v, positions = operands()
    k, v = (torch.randn(1, 4, 10, size) for size in (8, value_size))
    with FlopCounterMode(display=False) as ours:
        attend(q, k, v, positions, left=2, sinks=torch.ones(4))
    # Upstream has no formula for the CPU kernel; it has one for the two products of the plain path.
    plain = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with plain, FlopCounterMode(display=False) as theirs:
        F.scaled_dot_product_attention(q, k, v)
    assert ours.get_total_flops() == 2 * 4 * 6 * 10 * (8 + value_size)
    assert ours.get_total_flops() == theirs.get_total_flops()


class Cost(TorchDispatchMode):
    """Query-key pairs computed per head, and the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = 0
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            self.pairs += args[0].shape[2] * args[1].shape[2]
        elif func is torch.ops.aten.logsumexp.default:
            self.pairs += args[0].shape[2] * args[0].shape[3]
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes())
        return result


@contextmanager
def cost_of_attend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cost]:
    """A dispatch mode sees the op, not what its body does, so the mode is entered inside."""
    cost = Cost()

    def counted(*args: Any, **kwargs: Any) -> None:
        with cost:
            blocks.attend_blocks(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(op, "attend_blocks", counted)
        yield cost


KEYS = 8192
WORK = {
    "window": ({"left": 127}, range(KEYS), 0.05),
    "two-sided window": ({"left": 64, "right": 64}, range(KEYS), 0.05),
    "window of zigzag rows": ({"left": 127}, [*range(1024), *range(7168, KEYS), 0, 0], 0.0125),
    "window of interleaved rows": ({"left": 127}, range(0, KEYS, 4), 0.03),
    "wide window": ({"left": 1023}, range(KEYS), 0.15),
    "chunks": ({"chunk": 512}, range(KEYS), 1 / 16),
    "window with ALiBi": ({"left": 127, "slopes": torch.ones(1)}, range(KEYS), 0.05),
    "window with a soft cap": ({"left": 127, "softcap": 3.0}, range(KEYS), 0.05),
    # Each half: its prefix in full, its diagonal by the causal kernel (counted as a square here).
    "causal zigzag rows": ({}, [*range(1024), *range(7168, KEYS)], 0.141),
}


@pytest.mark.parametrize("options, positions, share", WORK.values(), ids=WORK.keys())
def test_work_follows_what_rows_see(options, positions, share, monkeypatch: pytest.MonkeyPatch) -> None:
    at = torch.tensor(list(positions))
    q, k, v = (torch.randn(1, 1, n, 4) for n in (len(at), KEYS, KEYS))
    with cost_of_attend(monkeypatch) as cost:
        attend(q, k, v, at, **options)
    assert 0 < cost.pairs <= share * KEYS * KEYS


@pytest.mark.parametrize("options", [{}, {"left": 2000}, {"softcap": 2.0}, {"slopes": torch.ones(1)}], ids=str)
def test_nothing_of_size_rows_by_keys_is_made(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 1, 4096, 4) for _ in "qkv")
    with cost_of_attend(monkeypatch) as cost:
        attend(q, k, v, torch.arange(4096), **options)
    assert 0 < cost.largest < 4096 * 4096 * 4 / 10


def test_the_work_check_sees_an_unwindowed_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 1, KEYS, 4) for _ in "qkv")
    with cost_of_attend(monkeypatch) as cost:
        attend(q, k, v, torch.arange(KEYS))
    assert cost.pairs > 0.05 * KEYS * KEYS


def broken(**change: torch.Tensor) -> dict[str, Any]:
    q, k, v, positions = operands()
    return {"q": q, "k": k, "v": v, "positions": positions, **change}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(4, 6, 8)}, r"4 dims \[B, H, rows, D\], found 3, 4, 4"),
        (
            {"k": torch.ones(1, 3, 10, 8)},
            r"v is \[1, 2, 10, 8\], required \[1, 3, 10, 8\]; q has 4 heads.*of the 3 of k",
        ),
        ({"v": torch.ones(1, 2, 9, 8)}, r"v is \[1, 2, 9, 8\], required \[1, 2, 10, 8\]"),
        ({"positions": torch.arange(5)}, r"positions is \[5\], required \[6\]"),
        ({"positions": torch.arange(6, dtype=torch.int32)}, r"positions is torch.int32, required torch.int64"),
        ({"k": torch.ones(1, 2, 10, 8, dtype=torch.bfloat16)}, r"dtypes are torch.float32, torch.bfloat16"),
        ({"sinks": torch.ones(3)}, r"sinks is \[3\], required \[4\]"),
        ({"slopes": torch.ones(3)}, r"slopes is \[3\], required \[4\].*Pass operands"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        attend(**broken(**change))


@pytest.mark.parametrize("rows, keys", [(0, 10), (3, 0)])
def test_empty_operands(rows: int, keys: int) -> None:
    q, k, v, _ = operands(rows, keys)
    out = attend(q, k, v, torch.zeros(rows, dtype=torch.int64))
    assert out.shape == q.shape
    assert not out.any()
