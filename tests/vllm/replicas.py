# SPDX-License-Identifier: Apache-2.0
"""The trained byte model on two replicas of two PCP ranks, its experts over all four; its requests; and one rank."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pcp_passes.demo.checkpoints import TARGET, checkpoint
from pcp_passes.demo.text import VOCABULARY, held_out_prompts
from pcp_passes.frontends.vllm.session import Group, Output, Request, Session, run
from tests.vllm.server import Answer, Server, serve, tell_workers

REPLICAS, PCP, DRAFTS = 2, 2, 2
MAX_LENGTH = 256
#: What vLLM asks a configuration for, and transformers takes for granted: routing, and the indexer's rotary pairs.
VLLM_ALONE = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "indexer_rope_interleave": True}
LIMITS = {"max_model_len": MAX_LENGTH, "max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 64}
#: vLLM would run a sparse model uncompiled, in graphs that break at will.
ENV = {"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
#: Lets a client call methods of the workers.
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
EXTENSION = {"--worker-extension-cls": "tests.vllm.replica_worker.ReplicaWorker"}


@functools.cache
def trained() -> Path:
    """The shipped checkpoint with vLLM's keys and a tokenizer, whose word for token ``i`` is ``w<i>``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp(prefix="pcp-trained-")) / TARGET
    shutil.copytree(checkpoint(TARGET), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | VLLM_ALONE))
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", model_max_length=8192).save_pretrained(folder)
    return folder


@functools.cache
def hundred() -> tuple[Request, ...]:
    """A hundred windows of text that the model never saw, of 9 to 32 bytes; every byte but the first is scored."""
    windows = held_out_prompts(100, 32).tolist()
    return tuple(Request(window[: 9 + (37 * i) % 24], 4, prompt_logprobs=True) for i, window in enumerate(windows))


@functools.cache
def long() -> tuple[Request, ...]:
    """Prompts that end one, three and nine tokens before the model's maximum, and one that stays well below."""
    windows = held_out_prompts(4, MAX_LENGTH).tolist()
    lengths = (1, 3, 9)
    return (*(Request(w[:-n], n) for w, n in zip(windows, lengths, strict=False)), Request(windows[3][:40], 24))


def one_rank() -> list[list[Output | None]]:
    """Answers to :func:`hundred` and :func:`long` on one rank, where nothing is rewritten, without drafts."""
    session = Session(
        model=str(trained()),
        groups=(Group(hundred()), Group(long())),
        pcp=1,
        options={},
        backend="eager",
        engine={**LIMITS, "enable_chunked_prefill": True, "enable_prefix_caching": True},
        env={"VLLM_DISABLE_COMPILE_CACHE": "1", **ENV},
    )
    return run(session, timeout_s=420).outputs


@contextlib.contextmanager
def lockstep(folder: Path, silence_s: float) -> Iterator[Server]:
    """The server: two replicas of two ranks, the experts over all four, two drafts a step."""
    more = {f"--{name.replace('_', '-')}": str(value) for name, value in LIMITS.items()} | EXTENSION
    more["--speculative-config"] = json.dumps({"method": "mtp", "num_speculative_tokens": DRAFTS})
    with serve(
        str(trained()),
        folder,
        pcp=PCP,
        replicas=REPLICAS,
        options={"silence_s": silence_s},
        more=more,
        flags=("--enable-expert-parallel",),
        env=ENV | DEVELOPMENT,
        start_s=400,
    ) as server:
        yield server


def reports(server: Server, folder: Path) -> list[dict[str, Any]]:
    """What the workers counted since they were told to ``watch``, by world rank."""
    tell_workers(server, "report", str(folder))
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    assert len(found) == REPLICAS * PCP
    return found


def difference(found: Sequence[Answer], wanted: Sequence[Output | None]) -> tuple[bool, float]:
    """Whether all tokens agree, and the largest difference between logprobs, the prompt's included."""
    tokens, largest = True, 0.0
    for ours, theirs in zip(found, wanted, strict=True):
        assert theirs is not None
        tokens &= ours.tokens == theirs.tokens
        pairs = [*zip(ours.logprobs, theirs.logprobs, strict=True)]
        pairs += zip(ours.prompt_logprobs, theirs.prompt_logprobs, strict=True)
        largest = max([largest, *(abs(a - b) for a, b in pairs)])
    return tokens, largest


def bits_per_byte(answers: Sequence[Any]) -> float:
    """Mean negative log2 probability of the prompts' bytes."""
    scored = [value for answer in answers for value in answer.prompt_logprobs]
    assert len(scored) > 1000
    return -float(sum(scored)) / len(scored) / math.log(2)
