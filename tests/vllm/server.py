# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` on loopback, started and ended by a test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from pcp_passes.frontends.vllm import cpu_runner
from pcp_passes.frontends.vllm.session import Request, kill_group


@dataclass(frozen=True)
class Server:
    """A running server: its address, its first process, its log."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def workers(self) -> list[psutil.Process]:
        """The worker processes, by rank."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        named = [(" ".join(child.cmdline()), child) for child in children]
        return [child for name, child in sorted(named, key=lambda pair: pair[0]) if "Worker" in name]

    def tail(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-5000:]


@contextlib.contextmanager
def serve(model: str, folder: Path, *, pcp: int, options: dict[str, Any], start_s: float = 300) -> Iterator[Server]:
    """Start ``vllm serve`` and wait until it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "float32",
        "--max-model-len": "256",
        "--max-num-seqs": "64",
        "--max-num-batched-tokens": "64",
        "--block-size": "32",
        "--prefill-context-parallel-size": str(pcp),
        "--additional-config": json.dumps({"pcp_passes": options}),
        "--compilation-config": json.dumps({"mode": 2, "backend": "eager", "custom_ops": ["-rotary_embedding"]}),
    }
    log = folder / "serve.log"
    env = os.environ | cpu_runner.environment(cores=tuple(range(pcp)))
    env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += [part for pair in arguments.items() for part in pair]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=env, start_new_session=True)
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        asyncio.run(_until_healthy(server, time.monotonic() + start_s))
        yield server
    finally:
        for worker in _descendants(process.pid):
            with contextlib.suppress(psutil.Error):
                worker.send_signal(signal.SIGKILL)
        kill_group(process.pid)
        process.wait(30)


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


async def _until_healthy(server: Server, deadline: float) -> None:
    async with aiohttp.ClientSession() as http:
        while time.monotonic() < deadline:
            assert server.process.poll() is None, f"the server ended:\n{server.tail()}"
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(f"{server.url}/health") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.5)
    raise AssertionError(f"the server did not answer in time:\n{server.tail()}")


@dataclass(frozen=True)
class Answer:
    """Tokens and their logprobs."""

    tokens: list[int]
    logprobs: list[float]


def ask(server: Server, requests: Sequence[Request]) -> list[Answer]:
    """All requests at once over HTTP."""
    return asyncio.run(_ask(server, requests))


async def _ask(server: Server, requests: Sequence[Request]) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        return await asyncio.gather(*(_one(http, server, request) for request in requests))


def _body(request: Request, **more: Any) -> dict[str, Any]:
    body = {"prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0, "logprobs": 0}
    return body | {"return_token_ids": True, "ignore_eos": True} | more


async def _one(http: aiohttp.ClientSession, server: Server, request: Request) -> Answer:
    async with http.post(f"{server.url}/v1/completions", json=_body(request)) as reply:
        data = await reply.json()
        assert reply.status == 200, data
    choice = data["choices"][0]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def abandon(server: Server, requests: Sequence[Request]) -> None:
    """Start the requests as streams and hang up on each after its first piece."""
    asyncio.run(_abandon(server, requests))


async def _abandon(server: Server, requests: Sequence[Request]) -> None:
    async def one(http: aiohttp.ClientSession, request: Request) -> None:
        async with http.post(f"{server.url}/v1/completions", json=_body(request, stream=True)) as reply:
            await reply.content.readline()
            reply.close()

    async with aiohttp.ClientSession() as http:
        await asyncio.gather(*(one(http, request) for request in requests))
