# SPDX-License-Identifier: Apache-2.0
"""A dump of the toy decoder, and the ``pcp`` command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pcp_passes.cli import app
from pcp_passes.passes import PassContext, build_variants
from pcp_passes.passes.observers import DumpObserver
from tests import toy_runs


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``sharded`` and ``replicated`` dumps of the dense toy decoder on 4 ranks. Not to be changed."""
    folder = tmp_path_factory.mktemp("pristine")
    build_variants(toy_runs.captured()[1].gm, PassContext(4), [DumpObserver(folder)])
    return folder


@pytest.fixture
def dump(pristine: Path, tmp_path: Path) -> Path:
    """A copy of the sharded dump that a test may break."""
    return Path(shutil.copytree(pristine / "sharded", tmp_path / "sharded"))


@pytest.fixture
def pcp() -> Callable[..., Result]:
    """``pcp("check", folder)``; an error of ours is in ``result.exception``."""
    runner = CliRunner()

    def run(*args: object) -> Result:
        return runner.invoke(app, [str(arg) for arg in args], env={"COLUMNS": "400", "TERM": "dumb"})

    return run


@pytest.fixture
def pcp_json(pcp: Callable[..., Result]) -> Callable[..., Any]:
    """``pcp_json("check", folder)``: the exit code, and what ``--json`` printed."""

    def run(*args: object) -> tuple[int, Any]:
        result = pcp(*args, "--json")
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, json.loads(result.stdout)

    return run
