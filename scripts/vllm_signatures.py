#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write down what this package relies on in a vLLM release, read from its sources; vLLM is neither installed nor run.

    scripts/vllm_signatures.py TREE VERSION [TARGET]

TREE is the folder that contains the ``vllm`` package, such as an unpacked wheel. TARGET is a JSON file, by default
``tests/data/vllm_signatures_<major>.<minor>.json``, with names only:

* ``functions``: the parameters of every symbol that ``pcp_passes.frontends.vllm.versions`` lists; null when absent;
* ``fields``: the fields of the dataclasses that the batch manager fills in;
* ``attributes``: what the upstream batch manager sets on ``self``.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_MANAGER = "vllm.v1.worker.gpu.pcp_manager"
DATACLASSES = (("vllm.v1.worker.gpu.input_batch", "InputBatch"), (_MANAGER, "PCPBatchMetadata"))


def snapshot(tree: Path, version: str) -> dict[str, Any]:
    """Everything above for the sources under ``tree``."""
    from pcp_passes.frontends.vllm.versions import SYMBOLS, Symbol, source_parameters

    def parameters(symbol: Symbol) -> list[str] | None:
        found = source_parameters(tree, symbol)
        return None if found is None else list(found)

    return {
        "version": version,
        "functions": {f"{symbol.module}.{symbol.qualname}": parameters(symbol) for symbol in SYMBOLS},
        "fields": {f"{module}.{name}": fields(tree, module, name) for module, name in DATACLASSES},
        "attributes": {f"{_MANAGER}.PCPManager": attributes(tree, _MANAGER, "PCPManager")},
    }


def fields(tree: Path, module: str, name: str) -> list[str] | None:
    """Annotated names in the body of a class; None when there is no such class."""
    found = _class(tree, module, name)
    if found is None:
        return None
    return [n.target.id for n in found.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def attributes(tree: Path, module: str, name: str) -> list[str]:
    """Methods of a class, and what its methods assign to ``self``."""
    found = _class(tree, module, name)
    names = {node.name for node in ast.walk(found or ast.Pass()) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(found or ast.Pass()):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            names.add(node.attr)
    return sorted(names)


def _class(tree: Path, module: str, name: str) -> ast.ClassDef | None:
    body = ast.parse((tree / (module.replace(".", "/") + ".py")).read_text()).body
    return next((n for n in body if isinstance(n, ast.ClassDef) and n.name == name), None)


def main(arguments: list[str]) -> int:
    if len(arguments) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    sys.path.insert(0, str(ROOT))
    tree, version = Path(arguments[0]), arguments[1]
    short = ".".join(version.split(".")[:2])
    target = Path(arguments[2]) if len(arguments) == 3 else ROOT / f"tests/data/vllm_signatures_{short}.json"
    target.write_text(json.dumps(snapshot(tree, version), indent=1) + "\n")
    print(target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
