# SPDX-License-Identifier: Apache-2.0
"""Verification of draft tokens: which are accepted, and the token that follows them.

At temperature 0 a draft is accepted while it is the most likely token. Otherwise by rejection sampling (Leviathan,
Kalman and Matias, ICML 2023; Chen et al., 2023): a draft x that was drawn from q is accepted with probability
``min(1, p(x) / q(x))``, and a rejected one is replaced by a draw from ``max(p - q, 0)``, normalised. What comes out is
distributed as p, however bad the drafter. A drafter that does not say from what it drew (it took its most likely
token, say) has put all of q on x: acceptance is p(x), and the replacement is drawn from p without x.

Worked example. Three requests with 2, 0 and 1 drafts, K = 2: ``cu_logits = [0, 3, 4, 6]``. Row ``cu_logits[r] + j`` is
the target's distribution at the place of draft j of request r; the last row of a request has no draft and gives the
bonus token. With the first request's second draft rejected and the third request's draft accepted::

    num_accepted = [1, 0, 1]
    sampled      = [[draft, replacement, -1], [bonus, -1, -1], [draft, bonus, -1]]
"""

from __future__ import annotations

import torch

from pcp_passes.errors import ConfigError
from pcp_passes.speculative.sample import argmax, draw, scaled
from pcp_passes.speculative.streams import ACCEPT, RESIDUAL, SAMPLE, uniforms


def verify(
    logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Verify the drafts of a batch. Shapes follow from ``L``, ``R``, ``K`` and ``V`` alone; nothing is read back.

    Args:
        logits: ``[L, V]``, the target's, request after request; rows from ``cu_logits[R]`` on are padding.
        cu_logits: i64 ``[R + 1]``, first logit row of each request; request r has ``1 + d`` rows, ``0 <= d <= K``.
        draft_ids: i64 ``[R, K]``, of which the first d are looked at. One that is not in the vocabulary, as -1 is not,
            is rejected with all that follow it, and the token in its place is drawn from the target.
        draft_logits: ``[R, K, V]``, what each draft was drawn from at the request's temperature. None takes each draft
            as certain: the one way for drafts that were not drawn, exact for drawn ones too, but accepts fewer of them.
        temperature, seeds: ``[R]``, float and i64.
        positions: i64 ``[L]``, positions of the logit rows.

    Returns:
        ``sampled`` i64 ``[R, K + 1]``, accepted drafts and the token after them, then -1; and ``num_accepted`` i64
        ``[R]``. A request without logit rows has neither.

    Raises:
        ConfigError: shapes that do not fit together.
    """
    _check(logits, cu_logits, draft_ids, draft_logits, temperature, seeds, positions)
    (num_rows, vocab), (num_requests, steps) = logits.shape, draft_ids.shape
    if num_rows == 0:
        return draft_ids.new_full((num_requests, steps + 1), -1), draft_ids.new_zeros(num_requests)

    counts = cu_logits[1:] - cu_logits[:-1]
    place = torch.arange(steps + 1, device=logits.device)
    rows = (cu_logits[:-1, None] + place).clamp(max=num_rows - 1)
    # The place after the last draft holds no draft, so that the bonus token is an ordinary case of a stop.
    drafts = torch.where(place < counts[:, None] - 1, torch.nn.functional.pad(draft_ids, (0, 1), value=-1), -1)
    drafts = torch.where(drafts < vocab, drafts, -1)

    accepted = _accepted(logits, rows, drafts, draft_logits, temperature, seeds, positions)
    num_accepted = accepted.long().cumprod(1).sum(1)
    stop = num_accepted[:, None]
    last = _after_accepted(
        logits[rows.gather(1, stop)[:, 0]],
        drafts.gather(1, stop)[:, 0],
        None if draft_logits is None or steps == 0 else _rows_of(draft_logits, num_accepted),
        temperature,
        seeds,
        positions[rows.gather(1, stop)[:, 0]],
    )
    sampled = torch.where(place < stop, drafts, torch.where(place == stop, last[:, None], -1))
    return torch.where(counts[:, None] > 0, sampled, -1), num_accepted


def _accepted(
    logits: torch.Tensor,
    rows: torch.Tensor,
    drafts: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """bool ``[R, K + 1]``: each draft judged by itself."""
    num_requests, places = drafts.shape
    request = torch.arange(num_requests, device=logits.device)[:, None].expand(num_requests, places).flatten()
    row, token = rows.flatten(), drafts.flatten()
    looked_up = token.clamp(min=0)[:, None]
    log_p = torch.log_softmax(scaled(logits[row], temperature[request]), -1).gather(1, looked_up)[:, 0]
    log_q = torch.zeros_like(log_p)
    if draft_logits is not None:
        padded = torch.nn.functional.pad(draft_logits, (0, 0, 0, 1)).flatten(0, 1)
        log_q = torch.log_softmax(scaled(padded, temperature[request]), -1).gather(1, looked_up)[:, 0]
    chance = uniforms(seeds[request], positions[row], ACCEPT, 1)[:, 0]
    drawn = chance * log_q.exp() < log_p.exp()
    likeliest = argmax(logits)[row] == token
    return ((token >= 0) & torch.where(temperature[request] > 0, drawn, likeliest)).reshape(drafts.shape)


def _after_accepted(
    logits: torch.Tensor,
    rejected: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """i64 ``[R]``, the token after the accepted drafts; ``rejected`` is the draft at its place, -1 where there is none.

    ``logits`` ``[R, V]`` and ``draft_logits`` ``[R, V]`` are those of that place.
    """
    scores = scaled(logits, temperature)
    p = torch.softmax(scores, -1)
    if draft_logits is None:
        q = (rejected[:, None] == torch.arange(logits.shape[-1], device=logits.device)).double()
    else:
        q = torch.softmax(scaled(draft_logits, temperature), -1)
    residual = (p - q).clamp(min=0)
    # p = q rejects nothing but for rounding; then any draw from p is right.
    replaces = (rejected >= 0) & (residual.sum(-1) > 0)
    scores = torch.where(replaces[:, None], residual.log(), scores)
    drawn = draw(scores, seeds, positions, torch.where(replaces, RESIDUAL, SAMPLE))
    return torch.where(temperature > 0, drawn, argmax(logits))


def _rows_of(draft_logits: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``draft_logits[r, places[r]]``; at the place after the last draft any row does: nothing was rejected there."""
    requests = torch.arange(draft_logits.shape[0], device=draft_logits.device)
    return draft_logits[requests, places.clamp(max=draft_logits.shape[1] - 1)]


def _check(
    logits: torch.Tensor,
    cu_logits: torch.Tensor,
    draft_ids: torch.Tensor,
    draft_logits: torch.Tensor | None,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    if logits.dim() != 2 or draft_ids.dim() != 2:
        raise ConfigError(
            f"verify: found logits {list(logits.shape)} and draft_ids {list(draft_ids.shape)}, required [L, V] and "
            "[R, K]. Stack the logit rows of all requests."
        )
    (num_rows, vocab), (requests, steps) = logits.shape, draft_ids.shape
    operands: list[tuple[str, torch.Tensor, tuple[int, ...]]] = [
        ("cu_logits", cu_logits, (requests + 1,)),
        ("temperature", temperature, (requests,)),
        ("seeds", seeds, (requests,)),
        ("positions", positions, (num_rows,)),
    ]
    if draft_logits is not None:
        operands.append(("draft_logits", draft_logits, (requests, steps, vocab)))
    wrong = [
        f"{name} is {list(found.shape)}, required {list(required)}"
        for name, found, required in operands
        if tuple(found.shape) != required
    ]
    if wrong:
        raise ConfigError(
            f"verify of logits {list(logits.shape)} and drafts {list(draft_ids.shape)}: {'; '.join(wrong)}. "
            "Pass operands of these shapes."
        )
