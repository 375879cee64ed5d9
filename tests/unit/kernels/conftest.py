# SPDX-License-Identifier: Apache-2.0
"""The child process with Triton's interpreter, one per test module; a cache of generated kernels for the tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.interpreted import Interpreted


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Generated kernels of a test session stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PCP_KERNELS_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreted]:
    """Call it with a function at the top level of a test module, and its arguments."""
    child = Interpreted()
    yield child
    child.close()
