# SPDX-License-Identifier: Apache-2.0
"""``pcp doctor``: is this environment one that the package knows, does vLLM find the plugin, do two ranks agree.

vLLM is looked at from outside, by its metadata and its sources; it is not imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from rich.console import Group as Lines
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pcp_passes.cli import selftest
from pcp_passes.errors import ConfigError
from pcp_passes.frontends.vllm import cpu_runner, versions
from pcp_passes.proof import PROOFS, Level

#: From the first release to below the second.
SUPPORTED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    "torch": ((2, 11), (2, 16)),
    "triton": ((3, 6), (3, 10)),
}
ENTRY_POINT = ("vllm.general_plugins", "pcp_passes", "pcp_passes.frontends.vllm.plugin:register")


@dataclass(frozen=True)
class Check:
    """One finding. A ``note`` limits what can run here and is no fault; a ``problem`` is one, and says what to do."""

    name: str
    found: str
    status: Literal["ok", "note", "problem"] = "ok"
    next: str = ""


def examine(self_test: bool) -> dict[str, Any]:
    """Everything ``pcp doctor`` knows, as plain data.

    Returns:
        ``healthy`` (no check is a problem); ``environment``, ``plugin`` and ``self_test``, lists of checks; ``proofs``,
        how far each feature has been proven.
    """
    tree = vllm_tree()
    sections = {
        "environment": list(_environment(tree)),
        "plugin": list(_plugin(tree)),
        "self_test": list(_self_test()) if self_test else [],
    }
    healthy = all(check.status != "problem" for checks in sections.values() for check in checks)
    plain = {name: [asdict(check) for check in checks] for name, checks in sections.items()}
    return {"healthy": healthy, **plain, "proofs": [asdict(proof) for proof in PROOFS]}


def vllm_tree() -> Path | None:
    """The folder that contains the installed ``vllm`` package; None when there is none."""
    spec = importlib.util.find_spec("vllm")
    return Path(spec.origin).parents[1] if spec is not None and spec.origin else None


def vllm_version(tree: Path) -> str:
    """What ``vllm.__version__`` is, without importing it."""
    source = tree / "vllm" / "_version.py"
    match = re.search(r"""^__version__ = .*['"]([^'"]+)['"]""", source.read_text(), re.M) if source.exists() else None
    return match[1] if match else _installed("vllm") or "unknown"


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _environment(tree: Path | None) -> Iterator[Check]:
    yield Check("python", ".".join(map(str, sys.version_info[:3])))
    yield _in_range("torch", required=True)
    yield _in_range("triton", required=False)
    yield _vllm(tree)
    transformers = _installed("transformers")
    yield Check("transformers", transformers) if transformers else Check("transformers", "not installed", "note")
    yield _devices()
    yield Check("cores", str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()))


def _in_range(name: str, *, required: bool) -> Check:
    (low, high), found = SUPPORTED[name], _installed(name)
    wanted = f"install {name} >={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    if found is None:
        return Check(name, "not installed", "problem" if required else "note", wanted)
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not low <= (int(match[1]), int(match[2])) < high:
        return Check(name, found, "problem", wanted)
    return Check(name, found)


def _vllm(tree: Path | None) -> Check:
    if tree is None:
        return Check("vllm", "not installed", "note", f"for the vLLM front end, install {' or '.join(versions.KNOWN)}")
    found = vllm_version(tree)
    try:
        return Check("vllm", f"{found} ({versions.require_known(found)})")
    except ConfigError as unknown:
        return Check("vllm", found, "problem", str(unknown))


def _devices() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("devices", "CPU")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("devices", ", ".join(names), "note", "nothing of this package has run on a GPU; see below")


def _plugin(tree: Path | None) -> Iterator[Check]:
    yield _entry_point(tree)
    yield _filter(os.environ.get("VLLM_PLUGINS"))
    if tree is None:
        return
    yield _runner()
    yield _signatures(tree)


def _entry_point(tree: Path | None) -> Check:
    group, name, value = ENTRY_POINT
    found = [point.value for point in metadata.entry_points(group=group) if point.name == name]
    if found == [value]:
        return Check("entry point", f"{group}: {name} = {value}")
    status: Literal["note", "problem"] = "note" if tree is None else "problem"
    return Check("entry point", f"{group}: {found or 'not found'}", status, "install the package: pip install -e .")


def _filter(allowed: str | None) -> Check:
    name = ENTRY_POINT[1]
    if allowed is None:
        return Check("VLLM_PLUGINS", "unset: every plugin is loaded")
    if name in allowed.split(","):
        return Check("VLLM_PLUGINS", allowed)
    return Check("VLLM_PLUGINS", repr(allowed), "problem", f"vLLM loads only these: unset it, or add {name}")


def _runner() -> Check:
    """PCP runs on vLLM's Model Runner V2 only, and that needs a Triton that finds a device."""
    name, asked = "Model Runner V2", os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked == "0":
        return Check(name, "VLLM_USE_V2_MODEL_RUNNER=0", "problem", "unset it, or set it to 1")
    import torch

    if _installed("triton") is None:
        return Check(name, "needs Triton, which is not installed", "note", _in_range("triton", required=False).next)
    if torch.cuda.is_available():
        return Check(name, "possible: Triton and a GPU")
    if os.environ.get(cpu_runner.SWITCH):
        return Check(name, f"possible: the stand-ins for CPU are on ({cpu_runner.SWITCH})")
    return Check(
        name,
        "only with stand-ins: Triton finds no device here",
        "note",
        "pcp generate and pcp inspect use them; your own program calls cpu_runner.enable() before importing vllm",
    )


def _signatures(tree: Path) -> Check:
    version = vllm_version(tree)
    name = "signatures"

    def read(symbol: versions.Symbol) -> tuple[str, ...] | None:
        try:
            return versions.source_parameters(tree, symbol)
        except (OSError, SyntaxError):
            return None

    wrong = list(versions.mismatches(version, read))
    if wrong:
        advice = "install an unmodified vLLM of a known version, or run with pcp_passes.mode=off"
        return Check(name, "\n".join(wrong), "problem", advice)
    checked = sum(symbol.expected(version) is not None for symbol in versions.SYMBOLS)
    return Check(name, f"the {checked} vLLM functions that are overridden or called are as expected")


def _self_test() -> Iterator[Check]:
    result = selftest.run()
    for name in result["passed"]:
        yield Check(name, "two ranks over gloo")
    for failure in result["failures"]:
        yield Check("self-test", failure, "problem", "PCP cannot work here until two local processes can do this")


_STYLE = {"ok": "green", "note": "yellow", "problem": "bold red"}
_LEVEL: dict[Level, str] = {
    "executed on GPU": "green",
    "executed on CPU with the real runner": "green",
    "contract-tested": "yellow",
    "read only": "red",
}


def render_findings(findings: dict[str, Any]) -> RenderableType:
    """A table of the checks, the ladder of proofs, and a verdict."""
    checks = Table(box=None, show_header=False, pad_edge=False)
    for title, key in (("environment", "environment"), ("plugin", "plugin"), ("self-test", "self_test")):
        if findings[key]:
            checks.add_row(Text(title, style="bold"))
            _add_checks(checks, findings[key])
    ladder = Table(title="how far each feature has been proven", title_justify="left", box=None, show_header=False)
    for level in get_args(Level):
        proven = [proof for proof in findings["proofs"] if proof["level"] == level]
        ladder.add_row(Text(level if proven else f"{level}: nothing", style=_LEVEL[level]))
        for proof in proven:
            ladder.add_row(f"  {proof['feature']}", Text(proof["note"], style="dim"))
    problems = [c for key in ("environment", "plugin", "self_test") for c in findings[key] if c["status"] == "problem"]
    verdict = (
        Text("healthy", style="bold green")
        if findings["healthy"]
        else Text(f"{len(problems)} problem{'s' * (len(problems) > 1)}", style="bold red")
    )
    return Lines(checks, ladder, verdict)


def _add_checks(table: Table, checks: Iterable[dict[str, Any]]) -> None:
    for check in checks:
        text = check["found"] if not check["next"] else f"{check['found']}\n  next  {check['next']}"
        table.add_row(f"  {check['name']}", Text(check["status"], style=_STYLE[check["status"]]), Text(text))
