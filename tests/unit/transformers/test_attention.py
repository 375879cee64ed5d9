# SPDX-License-Identifier: Apache-2.0
"""Logits of unmodified models through the "pcp" attention against their own eager attention.

Measured on these models: clean at most 1.2e-6 of the largest logit (float32, another order of summation); with a
planted fault at least 0.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.cache_utils import DynamicCache, StaticCache

from pcp_passes.errors import Refusal
from pcp_passes.frontends.transformers import MaskPattern, pcp_attention, pcp_attention_forward
from pcp_passes.frontends.transformers import attention as attention_module
from tests.unit.transformers.tiny import MODELS, VOCABULARY, WINDOW, CountOps, build, error, randomise, tokens

CLEAN = 1e-5
FAULT = 1e-3


def compare(model: Any, ids: torch.Tensor, **inputs: Any) -> tuple[float, int]:
    """Error of the "pcp" logits, and how many layers attended by position."""
    with torch.no_grad():
        required = model(ids, use_cache=False, **inputs).logits
        with pcp_attention(model), CountOps() as ops:
            found = model(ids, use_cache=False, **inputs).logits
    return error(found, required), ops.calls["pcp::attend"]


@pytest.mark.parametrize("length", [1, 5, WINDOW, WINDOW + 1, 33, 48])
@pytest.mark.parametrize("name", MODELS)
def test_equals_eager(name: str, length: int) -> None:
    model = build(name)
    off, attended = compare(model, tokens(length))
    assert off <= CLEAN
    assert attended == model.config.num_hidden_layers


def test_batch_without_padding() -> None:
    ids = tokens(19, batch=3)
    assert compare(build("gemma3_text"), ids) == (pytest.approx(0, abs=CLEAN), 2)
    assert compare(build("gemma3_text"), ids, attention_mask=torch.ones_like(ids)) == (pytest.approx(0, abs=CLEAN), 2)


@contextmanager
def _tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Iterator[None]:
    def attend(q: Any, k: Any, v: Any, positions: Any, **options: Any) -> torch.Tensor:
        options.update(change(options))
        return original(q, k, v, positions + options.pop("shift", 0), **options)

    original = attention_module.attend
    with monkeypatch.context() as patch:
        patch.setattr(attention_module, "attend", attend)
        yield


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", lambda o: {"shift": 1}),
        ("llama", lambda o: {"scale": o["scale"] * 1.5}),
        ("mistral", lambda o: {"left": o["left"] + 1}),
        ("mistral", lambda o: {"left": -1}),
        ("gemma3_text", lambda o: {"left": o["left"] - 1 if o["left"] > 0 else -1}),
        ("gemma2", lambda o: {"softcap": 0.0}),
        ("gpt_oss", lambda o: {"sinks": None}),
        ("gpt_oss", lambda o: {"sinks": o["sinks"].flip(0)}),
        ("llama4_text", lambda o: {"chunk": 0}),
        ("deepseek_v3", lambda o: {"right": -1}),
    ],
)
def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[..., Any]) -> None:
    with _tampered(monkeypatch, change):
        off, _ = compare(build(name), tokens(33))
    assert off > FAULT


@pytest.mark.parametrize("name", MODELS)
def test_padding_stays_an_explicit_mask(name: str) -> None:
    ids = tokens(17, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    model = build(name)
    with torch.no_grad():
        required = model(ids, attention_mask=mask, use_cache=False).logits
        with pcp_attention(model), CountOps() as ops:
            found = model(ids, attention_mask=mask, use_cache=False).logits
    assert error(found[0], required[0]) <= CLEAN
    # Rows of padding see no key: eager spreads them over all keys, sdpa gives 0. No other row reads them.
    assert error(found[1, 5:], required[1, 5:]) <= CLEAN
    assert ops.calls["pcp::attend"] == 0
    unmasked = model(ids, use_cache=False).logits
    assert error(unmasked[1, 5:], required[1, 5:]) > FAULT


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "deepseek_v3"])
def test_packed_sequences_stay_an_explicit_mask(name: str) -> None:
    ids = tokens(20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    model = build(name)
    off, attended = compare(model, ids, position_ids=positions)
    assert off <= CLEAN
    assert attended == 0
    with torch.no_grad():
        alone = model(ids[:, 8:], use_cache=False).logits
        with pcp_attention(model):
            packed = model(ids, position_ids=positions, use_cache=False).logits
    assert error(packed[:, 8:], alone) <= CLEAN


def test_given_positions_that_count_up_are_one_sequence() -> None:
    model = build("llama")
    off, attended = compare(model, tokens(20), position_ids=torch.arange(3, 23)[None])
    assert off <= CLEAN
    assert attended == model.config.num_hidden_layers


def test_a_mask_given_as_a_tensor_is_honoured() -> None:
    model, ids = build("llama"), tokens(12)
    seen = torch.rand(12, 12, generator=torch.Generator().manual_seed(1)) < 0.5
    seen = (seen | torch.eye(12, dtype=torch.bool)).tril()[None, None]
    additive = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    with torch.no_grad():
        required = model(ids, attention_mask=additive, use_cache=False).logits
        with pcp_attention(model):
            found = [model(ids, attention_mask=mask, use_cache=False).logits for mask in (seen, additive)]
        plain = model(ids, use_cache=False).logits
    assert max(error(logits, required) for logits in found) <= CLEAN
    assert error(plain, required) > FAULT


def test_bidirectional_decoder() -> None:
    model, ids = build("llama"), tokens(14)
    off, attended = compare(model, ids, is_causal=False)
    assert off <= CLEAN
    assert attended == model.config.num_hidden_layers
    with torch.no_grad():
        assert error(model(ids, use_cache=False).logits, model(ids, use_cache=False, is_causal=False).logits) > FAULT


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", MODELS)
def test_cached_chunks_and_decode(name: str, kind: str) -> None:
    """Prefill in chunks, then one token at a time; sliding layers drop keys on the way."""
    model, ids = build(name), tokens(31)
    made: dict[str, Callable[[], Any]] = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=40),
    }
    cache = made[kind]()
    with torch.no_grad():
        required = model(ids, use_cache=False).logits
        with pcp_attention(model), CountOps() as ops:
            found = [
                model(part, past_key_values=cache).logits
                for part in (ids[:, :13], ids[:, 13:25], *ids[:, 25:].split(1, dim=1))
            ]
    assert error(torch.cat(found, dim=1), required) <= CLEAN
    # Chunks count from position 0: a layer of them that has dropped keys cannot be stated by positions. With a static
    # cache transformers asks for tensors when it decodes.
    least = {"dynamic": 8, "static": 2}[kind]
    assert ops.calls["pcp::attend"] >= least * (1 if name == "llama4_text" else 2)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("bart", {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32}),
        ("t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4, "num_layers": 2}),
    ],
)
def test_encoder_and_cross_attention(model_type: str, fields: dict[str, Any]) -> None:
    """Layers that are not causal, and (t5) a position bias, which positions cannot state."""
    layers = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = AutoConfig.for_model(model_type, vocab_size=VOCABULARY, **special, **fields, **layers)
    model = randomise(AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager"))
    ids = tokens(11)
    off, attended = compare(model, ids, decoder_input_ids=tokens(9, seed=1))
    assert off <= CLEAN
    assert attended == (6 if model_type == "bart" else 0)


def test_encoder_only() -> None:
    config = AutoConfig.for_model(
        "bert", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = randomise(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    off, _ = compare(model, tokens(11))
    assert off <= CLEAN


def _states(rows: int = 4, keys: int = 4) -> list[torch.Tensor]:
    return [torch.randn(1, 2, n, 8) for n in (rows, keys, keys)]


def test_refuses_a_selection_of_keys_it_does_not_know() -> None:
    with pytest.raises(Refusal, match=r"(?s)block_indices.*leave this model its own attention"):
        pcp_attention_forward(torch.nn.Module(), *_states(), None, block_indices=torch.zeros(1))


def test_refuses_a_mask_of_another_type() -> None:
    with pytest.raises(Refusal, match="mask of type str"):
        pcp_attention_forward(torch.nn.Module(), *_states(), "causal")  # type: ignore[arg-type]


def test_refuses_lengths_other_than_the_masks() -> None:
    with pytest.raises(Refusal, match=r"(?s)found +4 queries, 6 keys.*required +4 queries, 4 keys"):
        pcp_attention_forward(torch.nn.Module(), *_states(4, 6), MaskPattern(4, 4, 0))


def test_refuses_sinks_with_a_position_bias() -> None:
    with pytest.raises(Refusal, match="without a position bias"):
        pcp_attention_forward(
            torch.nn.Module(), *_states(), MaskPattern(4, 4, 0), s_aux=torch.zeros(2), position_bias=torch.zeros(1)
        )


def test_dropout_goes_through_sdpa_with_the_mask_written_out() -> None:
    query, key, value = _states(9, 9)
    pattern = MaskPattern(9, 9, 0, left=2)
    torch.manual_seed(0)
    found, _ = pcp_attention_forward(torch.nn.Module(), query, key, value, pattern, dropout=0.5)
    torch.manual_seed(0)
    mask = pattern.dense(query.device)
    required = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=0.5)
    assert torch.equal(found, required.transpose(1, 2))
    kept, _ = pcp_attention_forward(torch.nn.Module(), query, key, value, pattern)
    assert error(found, kept) > FAULT
