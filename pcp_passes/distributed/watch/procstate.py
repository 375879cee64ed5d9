# SPDX-License-Identifier: Apache-2.0
"""Who a process is, and whether it still runs, read from ``/proc``.

Only used to say *why* a rank fell silent and to notice a death early. Everything answers ``"unknown"`` where ``/proc``
cannot tell: another machine, another pid namespace, a system without it.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from typing import Literal

ProcessState = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, recognisable from any other process that shares its kernel and its pid namespace.

    ``machine`` is the kernel's boot id and the pid namespace ("" when unreadable); ``started`` is the process's start
    time in clock ticks after boot, so a recycled pid is not taken for the same process.
    """

    hostname: str
    machine: str
    user: int
    pid: int
    started: int

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def decode(text: str) -> ProcessIdentity:
        fields = json.loads(text)
        return ProcessIdentity(fields["hostname"], fields["machine"], fields["user"], fields["pid"], fields["started"])

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname}"


def _stat(pid: int | str) -> tuple[str, int]:
    """State letter and start time of ``/proc/<pid>/stat``. The command, in parentheses, may itself hold parentheses."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def this_process() -> ProcessIdentity:
    """The identity of the calling process."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            machine = f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
        started = _stat("self")[1]
    except (OSError, ValueError, IndexError):
        machine, started = "", 0
    return ProcessIdentity(platform.node(), machine, os.getuid() if machine else -1, os.getpid(), started)


def state_of(process: ProcessIdentity, observer: ProcessIdentity) -> ProcessState:
    """State of ``process`` as ``observer`` (the calling process) can see it.

    A zombie counts as gone: it runs no code, it only waits for its parent to collect it.
    """
    if not observer.machine or process.machine != observer.machine:
        return "unknown"
    try:
        letter, started = _stat(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        # A /proc mounted with hidepid hides the living processes of other users.
        return "gone" if process.user == observer.user else "unknown"
    except (OSError, ValueError, IndexError):
        return "unknown"
    if started != process.started or letter in "ZX":
        return "gone"
    return "stopped" if letter in "Tt" else "running"
