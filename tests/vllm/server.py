# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` on loopback, started and ended by a test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from pcp_passes.frontends.vllm import cpu_runner
from pcp_passes.frontends.vllm.session import Request, kill_group
from tests.models import prompt


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
def serve(
    model: str,
    folder: Path,
    *,
    pcp: int,
    options: dict[str, Any],
    start_s: float = 300,
    replicas: int = 1,
    more: dict[str, str] | None = None,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> Iterator[Server]:
    """Start ``vllm serve`` and wait until it answers. ``replicas`` share the cores that one would have; ``more`` are
    further arguments, ``flags`` those without a value, ``env`` further variables."""
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
    if replicas > 1:
        arguments |= {"--data-parallel-size": str(replicas), "--api-server-count": "1"}
    arguments |= more or {}
    log = folder / "serve.log"
    variables = os.environ | cpu_runner.environment(cores=tuple(range(pcp)) * replicas)
    variables |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_DISABLE_COMPILE_CACHE": "1"}
    variables |= env or {}
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += [*(part for pair in arguments.items() for part in pair), *flags]
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=variables, start_new_session=True)
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
    """Tokens and their logprobs, and those of the prompt's tokens but the first, where a request asked for them."""

    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float] = field(default_factory=list)


def ask(server: Server, requests: Sequence[Request], replicas: Sequence[int] | None = None) -> list[Answer]:
    """All requests at once over HTTP, each to the data-parallel rank named for it; without, where the server likes."""
    return asyncio.run(_ask(server, requests, replicas))


async def _ask(server: Server, requests: Sequence[Request], replicas: Sequence[int] | None) -> list[Answer]:
    headers = [{"X-data-parallel-rank": str(rank)} for rank in replicas] if replicas else [{}] * len(requests)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        pairs = zip(requests, headers, strict=True)
        return await asyncio.gather(*(_one(http, server, request, header) for request, header in pairs))


def _body(request: Request, **more: Any) -> dict[str, Any]:
    body = {"prompt": request.prompt, "max_tokens": request.max_tokens, "temperature": 0, "logprobs": 0}
    return body | {"return_token_ids": True, "ignore_eos": True} | more


async def _one(http: aiohttp.ClientSession, server: Server, request: Request, headers: dict[str, str]) -> Answer:
    more = {"prompt_logprobs": 0} if request.prompt_logprobs else {}
    async with http.post(f"{server.url}/v1/completions", json=_body(request, **more), headers=headers) as reply:
        data = await reply.json()
        assert reply.status == 200, data
    choice = data["choices"][0]
    prompt = zip(request.prompt, choice.get("prompt_logprobs") or (), strict=False)
    scored = [entry[str(token)]["logprob"] for token, entry in prompt if entry is not None]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"], scored)


def tell_workers(server: Server, method: str, *args: Any) -> None:
    """Call a method of every worker of every replica (the server needs ``VLLM_SERVER_DEV_MODE=1``)."""
    asyncio.run(_tell(server, method, args))


def rows_run(server: Server) -> list[float]:
    """Token rows that each rank ran so far, as ``/metrics`` has them."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as reply:
        found = re.findall(r'^vllm:pcp_rows_total{rank="(\d+)"} (\S+)$', reply.read().decode(), re.MULTILINE)
    return [float(count) for _, count in sorted(found)]


async def _tell(server: Server, method: str, args: tuple[Any, ...]) -> None:
    body = {"method": method, "args": list(args)}
    timeout = aiohttp.ClientTimeout(total=120)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.post(f"{server.url}/collective_rpc", json=body) as reply,
    ):
        assert reply.status == 200, await reply.text()


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


def strike(server: Server, victim: psutil.Process, how: signal.Signals) -> None:
    """Signal ``victim`` while requests are in flight; every other process must end within 30 s of that."""
    first = psutil.Process(server.process.pid)
    others = [first, *(child for child in first.children(recursive=True) if child.pid != victim.pid)]
    clients = threading.Thread(target=_ask_in_vain, args=(server,))
    clients.start()
    time.sleep(1)
    victim.send_signal(how)
    _, alive = psutil.wait_procs(others, timeout=30)
    clients.join(30)
    assert not alive, f"still running after 30 s: {alive}\n{server.tail()}"
    assert not clients.is_alive(), "a client still waits"


def _ask_in_vain(server: Server) -> None:
    with contextlib.suppress(aiohttp.ClientError, AssertionError, KeyError):
        ask(server, [Request(prompt(30, seed=90 + n), 150) for n in range(8)])
