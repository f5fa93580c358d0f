"""The documentation says what the code does: links and paths exist, every parameter, metric, setting and
requirement is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import fields

from penstock.bench.workloads import WORKLOADS
from penstock.config.describe import keys
from penstock.gateway.api.anthropic.schemas import MessagesRequest
from penstock.gateway.api.endpoints import ENDPOINTS
from penstock.gateway.api.openai.responses.schemas import ResponsesRequest
from penstock.gateway.generation.schemas import ChatRequest, CompletionRequest
from penstock.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parent.parent
DOCS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted((ROOT / "docs").glob("*.md"))
COUNTS = {
    "API": 10,
    "GW": 8,
    "RT": 8,
    "ENG": 16,
    "CTX": 2,
    "RAG": 2,
    "CACHE": 2,
    "TOOL": 1,
    "OBS": 5,
    "OPS": 5,
    "PLAN": 3,
}


def words(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def requirement_rows() -> list[list[str]]:
    lines = [line for line in words("requirements.md").splitlines() if line.startswith("| R-")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_requirement_has_a_state() -> None:
    expected = [f"R-{area}-{number}" for area, count in COUNTS.items() for number in range(1, count + 1)]
    rows = requirement_rows()
    assert [row[0] for row in rows] == expected
    for identifier, _, state, code, tests in rows:
        assert re.match(r"(done|partial|not yet)\b", state), f"{identifier}: {state}"
        assert bool(tests) == (not state.startswith("not yet")), f"{identifier}: tests of what exists, and only that"
        assert not (state == "done" and not code), identifier


def test_paths_in_the_requirements_exist() -> None:
    for identifier, _, _, code, tests in requirement_rows():
        for base, cell in (("penstock", code), ("tests", tests)):
            for path in re.findall(r"`([^`]+)`", cell):
                assert (ROOT / base / path).exists(), f"{identifier} cites {base}/{path}"


@pytest.mark.parametrize("request_type", [ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest])
def test_every_parameter_is_in_the_table_of_the_gateway(request_type: type) -> None:
    page = words("gateway.md")
    missing = [field.name for field in fields(request_type) if f"`{field.name}`" not in page]
    assert not [name for name in missing if name != "stream_options"]


def test_every_endpoint_is_documented() -> None:
    page = words("gateway.md")
    for endpoint in ENDPOINTS:
        path = re.sub(r"\{.*\}", "{id}", endpoint.path)
        assert f"{endpoint.method} {path}" in page


def test_every_metric_is_documented() -> None:
    page = words("operations.md")
    page = re.sub(r"(\S*)\{([a-z,]+)\}(_\S*)", lambda m: " ".join(m[1] + part + m[3] for part in m[2].split(",")), page)
    rendered = Metrics(list).render().decode()
    names = {line.split()[2] for line in rendered.splitlines() if line.startswith("# TYPE ")}
    assert len(names) > 20
    assert not [name for name in names if name not in page and not name.startswith("process_")]


def test_settings_named_in_the_docs_exist() -> None:
    known = {key.path for key in keys()}
    sections = r"server|models\[N\]|generation|logging|telemetry|request_log|store|auth"
    for page in DOCS:
        for name in re.findall(rf"`((?:{sections})\.[a-z_]+)", page.read_text()):
            assert name in known, f"{page.name} names {name}"


def test_every_workload_is_documented() -> None:
    page = words("benchmarks.md")
    assert not [name for name in WORKLOADS if f"`{name}`" not in page]
