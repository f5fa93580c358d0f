"""Outside `engine/backends` nothing imports a backend or asks which one it runs on."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock.engine

ENGINE = Path(penstock.engine.__file__).parent
BACKENDS = ENGINE / "backends"
NOTICED = ("type", "name", "is_cuda", "is_cpu", "cuda", "backends")
"""How attributes begin that are written out to be looked at, which takes most of the time."""
PRIVATE = ("penstock.engine.backends.cpu", "penstock.engine.backends.cuda")


def problems(source: str) -> Iterator[str]:
    """What in a module depends on one backend."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"imports {alias.name}" for alias in node.names if alias.name.startswith(PRIVATE))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            yield from (f"imports {name}" for name in names if name.startswith(PRIVATE))
        elif isinstance(node, ast.Attribute) and node.attr.startswith(NOTICED):
            text = ast.unparse(node)
            if text.endswith(("device.type", "ops.name", "backend.name")) or node.attr in ("is_cuda", "is_cpu"):
                yield f"asks for {text}"
            elif text.startswith(("torch.cuda", "torch.backends")):
                yield f"uses {text}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id not in ("isinstance", "hasattr"):
                continue
            asked = ast.unparse(node.args[0])
            if node.func.id == "isinstance" and asked.endswith(("ops", "backend")):
                yield f"asks for the type of {asked}"
            if node.func.id == "hasattr" and asked.endswith(("ops", "backend", "head", "linear", "kernel")):
                yield f"probes {asked}"


MODULES = sorted(path for path in ENGINE.rglob("*.py") if not path.is_relative_to(BACKENDS))


def test_modules_outside_backends_do_not_know_their_backend() -> None:
    found = {str(path.relative_to(ENGINE)): list(problems(path.read_text())) for path in MODULES}
    assert len(found) > 300 and {path: wrong for path, wrong in found.items() if wrong} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from penstock.engine.backends import cpu",
        "from penstock.engine.backends.cuda.decode_graphs import DecodeGraphs",
        "import penstock.engine.backends.cpu.ops",
        "if kv.device.type == 'cuda': pass",
        "if x.is_cuda: pass",
        "fast = decoder.ops.name == 'triton'",
        "isinstance(decoder.ops, CpuOps)",
        "hasattr(head, 'out_dtype')",
        "torch.cuda.synchronize()",
    ],
)
def test_the_check_finds(source: str) -> None:
    assert list(problems(source))


def test_the_check_leaves_the_interface_alone() -> None:
    assert not list(problems("from penstock.engine.backends.interface import Backend\nbackend.in_host_memory"))
