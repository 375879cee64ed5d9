# SPDX-License-Identifier: Apache-2.0
"""Who computes absorbed MLA attention over selected cache rows: a registry of back ends, and the choice among them.

Every back end computes the same thing, so the choice is of speed alone::

    out[t, h] = sum_j p[t, h, j] * latent[slots[t, j]],   p = softmax_j(scale * <q[t, h], row[slots[t, j]]>)

=============  ============================  ================================================================
name           runs on                       rows
=============  ============================  ================================================================
``flashmla``   CUDA, with ``flash_mla``      bf16 of 512 + 64 columns; up to 128 heads, padded to 64 or 128
``triton``     CUDA, with ``triton``         bf16, fp16, fp32, and FP8 records: the generated kernel of pcp_kernels
``reference``  anything                      any, float64 too
=============  ============================  ================================================================

``"auto"`` takes the first of them that can; a name is an order, and an error when it cannot.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.options import unknown_choice

logger = logging.getLogger(__name__)

AUTO = "auto"
DEFAULT_WORKSPACE_BYTES = 256 << 20
"""Bound on the temporaries of one call, where the caller states none."""


@dataclass(frozen=True)
class Request:
    """What a call needs, without its data: enough to decide before anything runs."""

    device: str
    """``"cpu"``, ``"cuda"``."""
    dtype: torch.dtype
    """Of the queries."""
    rows: torch.dtype
    """Of the cache rows; ``torch.uint8`` for FP8 records."""
    heads: int
    latent: int
    rope: int


@dataclass(frozen=True, eq=False)
class Call:
    """The operands; see :func:`sparse_mla`."""

    q: torch.Tensor
    rows: torch.Tensor
    slots: torch.Tensor
    scale: float
    latent: int
    rope: int
    workspace_bytes: int

    @property
    def request(self) -> Request:
        """The call without its data."""
        return Request(
            self.q.device.type, self.q.dtype, self.rows.dtype, self.q.shape[1], self.latent, self.rope
        )  # fmt: skip


class Backend(Protocol):
    """One way to compute it; stateless."""

    name: ClassVar[str]

    def why_not(self, request: Request) -> str:
        """Why it cannot serve such calls here, in a few words; empty when it can."""
        ...

    def attend(self, call: Call) -> torch.Tensor:
        """``[T, H, L]`` in the dtype of the queries; 0 in rows without a slot."""
        ...


@dataclass(frozen=True)
class Reference:
    """Eager PyTorch, in bounded pieces."""

    name: ClassVar[str] = "reference"

    def why_not(self, request: Request) -> str:
        return ""

    def attend(self, call: Call) -> torch.Tensor:
        from pcp_kernels.reference import mla

        if call.rows.dtype == torch.uint8:
            out, _ = mla.sparse_mla_records(
                call.q, call.rows, call.slots, call.scale,
                latent_dim=call.latent, rope_dim=call.rope, workspace_bytes=call.workspace_bytes,
            )  # fmt: skip
        else:
            latent, rope = call.rows.split([call.latent, call.rope], dim=1)
            out, _ = mla.sparse_mla(
                call.q, latent, rope, call.slots, call.scale, workspace_bytes=call.workspace_bytes
            )  # fmt: skip
        return out


_STORES = {torch.uint8: "fp8", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def capability() -> tuple[int, int] | None:
    """Of the card; ``None`` where there is none, as when a configuration for another machine is checked."""
    try:
        return torch.cuda.get_device_capability()
    except (AssertionError, RuntimeError):
        return None


@dataclass(frozen=True)
class Triton:
    """The generated kernel that works through 16 heads at a time."""

    name: ClassVar[str] = "triton"

    def why_not(self, request: Request) -> str:
        if request.device != "cuda":
            return f"it needs a CUDA device, the tensors are on {request.device}"
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        from pcp_kernels.specs import MlaSpec

        try:
            MlaSpec(latent=request.latent, rope_dim=request.rope, store=_STORES.get(request.rows, str(request.rows)))
        except ValueError as error:
            return " ".join(str(error).split())
        if request.rows != torch.uint8 and request.dtype != request.rows:
            return f"queries have the dtype of the rows in it, here {request.dtype} and {request.rows}"
        if request.rows == torch.uint8 and request.dtype != torch.bfloat16:
            return f"queries over FP8 records are bf16 in it, here {request.dtype}"
        card = capability()
        if request.rows == torch.uint8 and card is not None and card < (8, 9):
            return f"FP8 records take compute capability 8.9, this is {card}"
        return ""

    def attend(self, call: Call) -> torch.Tensor:
        from pcp_kernels import ops

        bound = call.workspace_bytes
        if call.rows.dtype == torch.uint8:
            out, _ = ops.sparse_mla_records(
                call.q, call.rows, call.slots, call.scale,
                latent_dim=call.latent, rope_dim=call.rope, workspace_bytes=bound,
            )  # fmt: skip
        else:
            latent, rope = call.rows.split([call.latent, call.rope], dim=1)
            out, _ = ops.sparse_mla(call.q, latent, rope, call.slots, call.scale, workspace_bytes=bound)
        return out


@dataclass(frozen=True)
class FlashMLA:
    """``flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale)`` of deepseek-ai/FlashMLA.

    It takes queries ``[T, H, 576]`` with T at least 1 and H 64 or 128, rows ``[S, 1, 576]`` and indices i32
    ``[T, 1, 128 m]``, where -1 is no row, and leaves rows without any index undefined.
    """

    name: ClassVar[str] = "flashmla"
    module: ClassVar[str] = "flash_mla"
    heads: ClassVar[tuple[int, ...]] = (64, 128)
    keys: ClassVar[int] = 128
    capabilities: ClassVar[tuple[int, ...]] = (9, 10)

    def why_not(self, request: Request) -> str:
        if request.device != "cuda":
            return f"it needs a CUDA device, the tensors are on {request.device}"
        if importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        card = capability()
        if card is not None and card[0] not in self.capabilities:
            return f"it runs on compute capability 9 and 10, this is {card}"
        if request.heads > max(self.heads):
            return f"it takes at most {max(self.heads)} heads, here {request.heads}"
        if (request.latent, request.rope) != (512, 64):
            return f"rows have 512 + 64 columns in it, here {request.latent} + {request.rope}"
        if request.dtype != torch.bfloat16 or request.rows != torch.bfloat16:
            return f"queries and rows are bf16 in it, here {request.dtype} and {request.rows}"
        return ""

    def attend(self, call: Call) -> torch.Tensor:
        flash: Any = importlib.import_module(self.module)
        tokens, heads, _ = call.q.shape
        if not tokens or not call.rows.shape[0] or not call.slots.shape[1]:  # a launch of no blocks is an error
            return call.q.new_zeros(tokens, heads, call.latent)
        wanted = next(number for number in self.heads if number >= heads)
        q = torch.nn.functional.pad(call.q, (0, 0, 0, wanted - heads))
        keys = call.slots.shape[1]
        slots = torch.nn.functional.pad(call.slots, (0, -(-keys // self.keys) * self.keys - keys), value=-1)
        rows = call.rows if call.rows.is_contiguous() else call.rows.contiguous()
        out = flash.flash_mla_sparse_fwd(q.contiguous(), rows[:, None], slots[:, None].contiguous(), call.scale)[0]
        seen = (call.slots >= 0).any(1)
        return torch.where(seen[:, None, None], out[:, :heads], 0.0).to(call.q.dtype)


BACKENDS: dict[str, Backend] = {one.name: one for one in (FlashMLA(), Triton(), Reference())}
"""In the order that ``"auto"`` tries them."""


def register_backend(backend: Backend) -> None:
    """Add a back end in front of those that are known, or replace the one of its name.

    Raises:
        ConfigError: its name is ``"auto"``.
    """
    if backend.name == AUTO:
        raise ConfigError("a back end cannot be called 'auto', which stands for the choice among them; rename it")
    rest = {name: held for name, held in BACKENDS.items() if name != backend.name}
    BACKENDS.clear()
    BACKENDS.update({backend.name: backend, **rest})


def available(request: Request) -> dict[str, str]:
    """By name of each back end: why it cannot serve such calls here, empty when it can."""
    return {name: backend.why_not(request) for name, backend in BACKENDS.items()}


def choose(request: Request, backend: str = AUTO) -> Backend:
    """The back end for such calls.

    Raises:
        ConfigError: no back end of that name, or it cannot serve them; lists those that can, and why others cannot.
    """
    if backend not in (AUTO, *BACKENDS):
        raise ConfigError(unknown_choice("sparse attention back end", backend, (AUTO, *BACKENDS)))
    reasons = available(request)
    usable = [name for name, reason in reasons.items() if not reason]
    if backend in usable:
        return BACKENDS[backend]
    if backend == AUTO and usable:
        return BACKENDS[usable[0]]
    others = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason)
    raise ConfigError(
        f"no sparse attention by {backend!r} for {request.dtype} queries of {request.heads} heads over {request.rows} "
        f"rows of {request.latent} + {request.rope} on {request.device}. Available: {', '.join(usable) or 'none'}. "
        f"Not available: {others or 'none'}. Choose an available one, or 'auto'."
    )


def sparse_mla(
    q: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    scale: float,
    *,
    latent: int,
    rope: int,
    backend: str = AUTO,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> torch.Tensor:
    """Absorbed MLA attention of each query over its own selection of rows.

    Args:
        q: ``[T, H, L + R]``, the absorbed query, then the rope query.
        rows: ``[S, L + R]``, latent then rope key; or u8 ``[S, W]``, FP8 latent records of pcp_kernels.
        slots: i32 ``[T, k]`` into ``rows``, none twice in a row; -1 stands for none, anywhere.
        scale: factor of the logits.
        latent, rope: L and R.
        backend: a name of :data:`BACKENDS`, or ``"auto"``.
        workspace_bytes: bound on temporaries of the reference; the others take no memory that grows with the keys.

    Returns:
        ``[T, H, L]``, dtype of ``q``; 0 in rows without a slot.

    Raises:
        ConfigError: operands that do not fit together, or a back end that cannot serve them.
    """
    width = rows.shape[1] if rows.dim() == 2 else -1
    fits = q.dim() == 3 and q.shape[2] == latent + rope and slots.dim() == 2 and slots.shape[0] == q.shape[0]
    if not fits or width < 0 or (rows.dtype != torch.uint8 and width != latent + rope):
        raise ConfigError(
            f"sparse attention: found queries {list(q.shape)}, {rows.dtype} rows {list(rows.shape)} and slots "
            f"{list(slots.shape)}; required [T, H, {latent + rope}], [S, {latent + rope}] or uint8 records, and [T, k]."
        )
    call = Call(q, rows, slots, scale, latent, rope, workspace_bytes)
    chosen = choose(call.request, backend)
    logger.debug("sparse attention by %s", chosen.name)
    return chosen.attend(call)
