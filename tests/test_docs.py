"""The documentation is true: links, anchors, paths, commands, options, endpoints and settings that pages name exist;
the tables of layers, of "Where is what?" and of requirements match the tree; examples parse."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from msgspec.structs import fields

from penstock.bench.workloads import WORKLOADS
from penstock.cli.app import app
from penstock.config.describe import keys
from penstock.config.load import check
from penstock.config.tree import parse_yaml
from penstock.gateway.api.anthropic.schemas import MessagesRequest
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.openai.responses.schemas import ResponsesRequest
from penstock.gateway.generation.schemas import ChatRequest, CompletionRequest
from penstock.planning.catalogue import SECTIONS, catalogue_of
from penstock.telemetry.metrics import Metrics
from tests.clients.environment import clients
from tests.clients.report import read

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "penstock"
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
REQUIREMENTS = {
    "API": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12],
    "GW": list(range(1, 11)),
    "RT": list(range(1, 12)),
    "ENG": list(range(1, 21)),
    "CTX": [1, 2],
    "RAG": [1, 2],
    "CACHE": [1, 2],
    "TOOL": [1],
    "OBS": list(range(1, 6)),
    "OPS": list(range(1, 8)),
    "PLAN": [1, 2, 3],
}
# Files that examples tell the reader to write.
EXAMPLE_FILES = {"clock_server.py", "moderator.py"}
# Where paths in the text may begin. Pages of the engine name its files from `penstock/engine/` on.
BASES = [ROOT, PACKAGE, PACKAGE / "engine", ROOT / "tests", ROOT / "docs"]
FILE_ENDINGS = r"(?:py|h|cpp|lua|tsv|json|yml|yaml|svg|md|toml)"

every_page = pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))


def page_text(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def outside_fences(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def fences(text: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.S | re.M)
    return [body for language, body in found if language in languages]


def inline_code(text: str) -> list[str]:
    return [" ".join(code.split()) for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", outside_fences(text))]


def table(text: str, header: str) -> list[list[str]]:
    """The rows of the table under the header line that begins with `header`."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def anchors(page: Path) -> set[str]:
    """Of the headings, and those that older links use (`<a id="...">`)."""
    text = outside_fences(page.read_text())
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    named = set(re.findall(r'<a id="([^"]+)">', text))
    return named | {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@every_page
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        linked = (page.parent / target) if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


# Paths and names of the code


def is_path(code: str) -> bool:
    return bool(re.fullmatch(rf"[\w-]+(?:/[\w.-]+)*(?:/|\.{FILE_ENDINGS})", code)) and not code.startswith(".")


@functools.cache
def file_names() -> frozenset[str]:
    inside = (folder.rglob("*.*") for folder in (PACKAGE, ROOT / "tests", ROOT / "docs", ROOT / "deploy"))
    return frozenset(path.name for path in itertools.chain(ROOT.glob("*.*"), *inside)) | EXAMPLE_FILES


@every_page
def test_paths_that_pages_name_exist(page: Path) -> None:
    text = page.read_text()
    names = file_names()
    for code in inline_code(text):
        if not is_path(code):
            continue
        if "/" in code:
            assert any((base / code).exists() for base in BASES), f"{page.name} names {code}"
        elif code.endswith((".py", ".h", ".cpp")):
            assert code in names, f"{page.name} names {code}"
    for path in re.findall(rf"(?<![\w/.])((?:bench|tests|deploy)/[\w/.-]+\.{FILE_ENDINGS})\b", text):
        assert any((base / path).exists() for base in BASES), f"{page.name} names {path}"


@every_page
def test_modules_that_pages_import_exist(page: Path) -> None:
    # The changelog also names modules by where they were.
    text = page.read_text() if page.name != "CHANGELOG.md" else ""
    for name in re.findall(r"\bpenstock(?:\.[a-z_]+)+", text):
        if name.startswith(("penstock.yaml", "penstock.db")) or name in LOGGERS:
            continue
        path = PACKAGE.joinpath(*name.split(".")[1:])
        assert path.is_dir() or path.with_suffix(".py").exists() or path.parent.with_suffix(".py").exists(), name


LOGGERS = {
    "penstock.request",
    "penstock.slow",
    "penstock.request_id",
    "penstock.tenant",
    "penstock.user",
}


def layers() -> list[str]:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = [contract for contract in contracts if contract["name"] == "Imports point downward"]
    listed = [part.strip(" ()") for line in contract["layers"] for part in re.split("[|:]", line)]
    return [name for name in listed if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").exists()]


def test_layer_table_is_the_tree_in_the_order_of_the_import_contract() -> None:
    named = [row[0].strip("`") for row in table(page_text("architecture.md"), "| folder |")]
    assert [name.rstrip("/").removesuffix(".py") for name in named] == layers()
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in PACKAGE.glob("[a-z]*.py")}
    assert folders | modules == set(layers())


def defined_names(path: Path) -> set[str]:
    """Classes, functions and methods of the modules at `path`."""
    names: set[str] = set()
    for module in [path] if path.is_file() else path.rglob("*.py"):
        if module.suffix != ".py":
            return set(re.findall(r"\w+", module.read_text()))
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
    return names


def test_where_is_table_names_what_exists() -> None:
    rows = table(page_text("architecture.md"), "| Where is |")
    assert len(rows) >= 15
    for question, path, name in rows:
        found = PACKAGE / path.strip("`")
        assert found.exists(), f"{question} {path}"
        for part in re.findall(r"`([\w.]+)", name):
            assert part.split(".")[-1] in defined_names(found), f"{question} {path} {part}"


def test_glossary_names_classes_that_exist() -> None:
    for word, path, _ in table(page_text("architecture.md"), "| class |"):
        found = PACKAGE / path.strip("`")
        assert found.exists(), f"{word}: {path}"
        for name in re.findall(r"`(\w+)`", word):
            assert name in defined_names(found), f"{word}: {path}"


def test_size_of_the_core_that_the_readme_gives() -> None:
    engine = PACKAGE / "engine"
    core = [
        "core.py",
        "admission.py",
        "emission.py",
        "scheduler.py",
        "roster.py",
        "turns.py",
        "waiting_queue.py",
        "sequence.py",
        "request.py",
        "kv/*.py",
        "runner/**/*.py",
        "models/decoder.py",
        "models/llama.py",
    ]
    lines = sum(path.read_text().count("\n") for pattern in core for path in engine.glob(pattern))
    (said,) = re.findall(r"is ([\d,]+) lines of\s+Python", (ROOT / "README.md").read_text())
    assert abs(lines - int(said.replace(",", ""))) <= 150, lines


# Commands


def commands(text: str) -> Iterator[list[str]]:
    """Command lines in shell examples and in inline code, as words."""
    lines = [
        line for body in fences(text, "sh", "bash", "console", "") for line in body.replace("\\\n", " ").splitlines()
    ]
    for line in lines + inline_code(text):
        line = re.sub(r"\s+#.*$", "", line.strip().removeprefix("$ "))
        for part in re.split(r"\s*(?:&&|;|\||&(?=\s|$))\s*", line):
            try:
                words = shlex.split(part)
            except ValueError:
                continue
            if words and words[0].removeprefix(".venv/bin/") in ("penstock", "make", "python"):
                yield [words[0].removeprefix(".venv/bin/"), *words[1:]]


COMMANDS: click.Command = typer.main.get_command(app)


def check_command(words: list[str], page: str) -> None:
    command = COMMANDS
    line = "penstock " + " ".join(words)
    while words and hasattr(command, "commands") and re.fullmatch("[a-z-]+", words[0]):
        assert words[0] in command.commands, f"{page}: {line}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in [*parameter.opts, *parameter.secondary_opts]} | {
        "--help"
    }
    for word in words:
        if re.match(r"--?[a-z]", word):
            assert word.split("=")[0] in known, f"{page}: {line}: no option {word}"


@every_page
def test_commands_and_options_that_pages_name_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.M))
    for program, *words in commands(page.read_text()):
        if program == "penstock":
            check_command(words, page.name)
        elif program == "make":
            goals = [word for word in words if re.fullmatch("[a-z-]+", word)]
            assert set(goals) <= targets, f"{page.name}: make {' '.join(words)}"
        elif words and re.match(r"(bench|tests)/", words[0]):
            script = (ROOT / words[0]).read_text()
            for word in words[1:]:
                if word.startswith("--"):
                    option = word.split("=")[0]
                    known = option in script or option.strip("-").replace("-", "_") in script
                    assert known, f"{page.name}: {words[0]} has no option {option}"


def test_every_command_is_documented() -> None:
    tree = COMMANDS
    assert not [name for name in tree.commands if f"`penstock {name}" not in page_text("operations.md")]
    named = set(re.findall(r"^penstock bench ([a-z-]+)", page_text("benchmarks.md"), flags=re.M))
    assert named == set(tree.commands["bench"].commands)


# What the server offers


def test_every_requirement_has_a_state() -> None:
    expected = [f"R-{area}-{number}" for area, numbers in REQUIREMENTS.items() for number in numbers]
    rows = requirement_rows()
    assert [row[0] for row in rows] == expected
    for identifier, _, state, code, tests in rows:
        assert re.match(r"(done|partial|not yet)\b", state), f"{identifier}: {state}"
        assert bool(tests) == (not state.startswith("not yet")), f"{identifier}: tests of what exists, and only that"
        assert not (state == "done" and not code), identifier


def requirement_rows() -> list[list[str]]:
    lines = [line for line in page_text("requirements.md").splitlines() if line.startswith("| R-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_paths_in_the_requirements_exist() -> None:
    for identifier, _, _, code, tests in requirement_rows():
        for base, cell in (("penstock", code), ("tests", tests)):
            for path in re.findall(r"`([^`]+)`", cell):
                assert (ROOT / base / path).exists(), f"{identifier} cites {base}/{path}"


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest])
def test_every_parameter_is_in_the_table_of_the_gateway(request_type: type) -> None:
    page = page_text("gateway.md")
    missing = [field.name for field in fields(request_type) if f"`{field.name}`" not in page]
    assert not [name for name in missing if name != "stream_options"]


def test_every_endpoint_is_documented() -> None:
    page = page_text("gateway.md")
    for endpoint in ENDPOINTS:
        path = re.sub(r"\{[^}]*\}", "{id}", endpoint.path)
        assert f"{endpoint.method} {path}" in page


@every_page
def test_endpoints_that_pages_name_exist(page: Path) -> None:
    known = [re.sub(r"\\\{[^}]*\\\}", "[^/]+", re.escape(f"{one.method} {one.path}")) for one in ENDPOINTS]
    for named in re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[\w/{}.-]+)", page.read_text()):
        assert any(re.fullmatch(pattern, named) for pattern in known), f"{page.name} names {named}"


def metric_names() -> set[str]:
    rendered = Metrics(list).render().decode()
    return {line.split()[2] for line in rendered.splitlines() if line.startswith("# TYPE ")}


def test_every_metric_is_documented() -> None:
    page = page_text("operations.md")
    page = re.sub(r"(\S*)\{([a-z,]+)\}(_\S*)", lambda m: " ".join(m[1] + part + m[3] for part in m[2].split(",")), page)
    names = metric_names()
    assert len(names) > 20
    assert not [name for name in names if name not in page and not name.startswith("process_")]


@every_page
def test_settings_that_pages_name_exist(page: Path) -> None:
    known = {key.path for key in keys()}
    sections = "|".join({re.escape(path.split(".")[0]) for path in known})
    for name in re.findall(rf"`((?:{sections})\.[a-z0-9_]+)", page.read_text()):
        if not name.endswith((".py", ".md")):
            assert name in known, f"{page.name} names {name}"


@every_page
def test_configuration_examples_are_valid(page: Path) -> None:
    for example in fences(page.read_text(), "yaml"):
        tree = parse_yaml(example, page.name)
        if set(tree.value) <= set(SECTIONS):
            catalogue_of(tree)
        elif not example.lstrip().startswith(("groups:", "scrape_configs:")):
            check(tree)


@every_page
def test_python_examples_parse(page: Path) -> None:
    for example in fences(page.read_text(), "python"):
        ast.parse(example)


@every_page
def test_curl_examples_say_what_they_send(page: Path) -> None:
    """Without that, curl declares a form, which a server without keys refuses (415) except in Ollama's API."""
    for match in re.finditer(r"^[$ ]*curl (?:'[^']*'|\"[^\"]*\"|\\\n|[^'\"\n])*", page.read_text(), re.MULTILINE):
        command = match[0]
        if " -d " in command and "/api/" not in command:
            assert "content-type:" in command.lower(), command


def test_every_workload_is_documented() -> None:
    page = page_text("benchmarks.md")
    assert not [name for name in WORKLOADS if f"`{name}`" not in page]


def test_every_client_has_been_run() -> None:
    rows = read(page_text("clients.md"))
    assert {row.client for row in rows} == set(clients()), "run `make test-clients`, which writes the table"
    assert not [row for row in rows if row.result != "works"]
    asked = (
        "claude-code codex opencode aider vercel-ai litellm outlines guidance guidellm lm-eval inference-perf aiperf"
    )
    assert {*asked.split(), "aiperf"} <= set(clients())
    pinned = {name: client.python[:1] or client.npm[:1] for name, client in clients().items()}
    for row in rows:
        assert not pinned[row.client] or pinned[row.client][0].endswith(row.version), row
