"""Imports: what must stay light, stays light. (`lint-imports` checks that layers point downward, test_extras.py what
gateways do without.)"""

import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import grimp
import pytest

import penstock


def imported_by(*modules: str) -> list[set[str]]:
    """Top-level packages that are loaded after importing each of `modules` in turn in a fresh interpreter."""
    show = "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    code = "import sys\n" + "".join(f"import {module}; {show}\n" for module in modules)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in said.splitlines()]


def test_the_command_line_starts_without_the_libraries_that_fetch_models() -> None:
    (loaded,) = imported_by("penstock.cli.app, penstock.sources.resolve")
    assert not loaded & {"huggingface_hub", "obstore"}


@pytest.mark.slow
def test_the_engine_imports_neither_web_nor_text_libraries_and_nothing_needs_transformers() -> None:
    engine, everything = imported_by("penstock.engine.core", "penstock.bench.compare")
    assert "torch" in engine
    assert not engine & {"fastapi", "httptools", "httpx", "zmq", "msgspec", "tokenizers", "typer", "yaml"}
    assert "transformers" not in everything


ESTABLISHED = frozenset(
    [
        "accounting",
        "autoscaling",
        "caching",
        "decoding",
        "encoding",
        "loading",
        "planning",
        "pooling",
        "logging",
        "metering",
        "rendering",
        "routing",
        "sampling",
        "smoothing",
        "testing",
        "tracing",
    ]
)
"""Activities that the field names things after."""
NOUNS = frozenset(("keyring", "staging"))


def modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(penstock.__path__, "penstock."):
        yield module.name


def cycles(graph: grimp.ImportGraph, package: str) -> list[list[str]]:
    """The strongly connected components of more than one module inside `package` (Tarjan's algorithm)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if not imported.startswith(f"{package}."):
                continue
            if imported not in order:
                visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in path:
                lowest[module] = min(lowest[module], order[imported])
        if lowest[module] == order[module]:
            component = path[path.index(module) :]
            del path[path.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(graph.modules):
        if module.startswith(f"{package}.") and module not in order:
            visit(module)
    return found


def test_cycles_are_found() -> None:
    graph = grimp.ImportGraph()
    for importer, imported in (("p.a", "p.b"), ("p.b", "p.c"), ("p.c", "p.a"), ("p.d", "p.a"), ("p.c", "q.x")):
        graph.add_import(importer=importer, imported=imported)
    assert cycles(graph, "p") == [["p.a", "p.b", "p.c"]]


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph("penstock", cache_dir=None)


@pytest.mark.parametrize("package", ["penstock.gateway", "penstock.engine"])
def test_no_more_than_two_files_of_a_package_import_each_other_in_a_circle(
    graph: grimp.ImportGraph, package: str
) -> None:
    found = cycles(graph, package)
    assert not [cycle for cycle in found if len(cycle) > 2]


def test_modules_are_named_after_things_and_not_after_activities() -> None:
    named = {name: name.rpartition(".")[2].rpartition("_")[2] for name in modules()}
    gerunds = {name for name, word in named.items() if word.endswith("ing")}
    assert not [name for name in gerunds if named[name] not in ESTABLISHED | NOUNS]


def test_only_the_gateways_process_knows_its_composition(graph: grimp.ImportGraph) -> None:
    importers = graph.find_modules_that_directly_import("penstock.gateway.process.composition")
    inside = {name for name in importers if name.startswith("penstock.gateway.")}
    assert inside == {"penstock.gateway.process.main"}
