"""`make audit`: known vulnerabilities of the pinned dependencies, their licences, and whether each pin is needed.

Needs nothing but the environment it looks at and `constraints.txt`. Advisories come from OSV (api.osv.dev), which also
has those of PyPA and GitHub. A machine that cannot reach it takes an export of the same database:

    curl -O https://osv-vulnerabilities.storage.googleapis.com/PyPI/all.zip
    make audit ARGS="--database all.zip"

Exit status: 0, nothing found; 1, something to mend; 3, nothing found, but advisories could not be checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).parents[1]
OSV = "https://api.osv.dev/v1"
TIMEOUT_S = 20.0
OK, FOUND, UNCHECKED = 0, 1, 3
_IMPORT = re.compile(r"""(?:^[ \t]*(?:from|import)[ ]|(?:importorskip|find_spec|import_module)\(["'])(\w+)""", re.M)
COPYLEFT = re.compile(r"\b(A?GPL|GNU (Affero )?General Public)", re.I)
"""Licences that would bind what is built on Penstock. The LGPL does not, for a library that can be exchanged."""
REVIEWED: dict[str, str] = {}
"""Packages whose licence was read, with what was found."""
NOT_IMPORTED = frozenset(
    {"ruff", "mypy", "import-linter", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "types-pyyaml"}
)
"""Direct dependencies that are run or loaded as plugins."""


@dataclass(frozen=True, slots=True)
class Finding:
    package: str
    version: str
    advisory: str
    summary: str
    fixed: str


class Unreachable(Exception):
    """The advisory database cannot be asked from here."""


def pins(path: Path) -> dict[str, str]:
    """Package (canonical name) to version, from a constraints file."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line:
            name, _, version = line.partition("==")
            found[canonicalize_name(name)] = version.strip()
    return found


def ask_osv(pinned: Mapping[str, str], url: str = OSV) -> list[Finding]:
    """What OSV knows about these versions."""
    names = list(pinned)
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": pinned[name]} for name in names]
    answers = _fetch(f"{url}/querybatch", {"queries": queries})["results"]
    found: list[Finding] = []
    for name, answer in zip(names, answers, strict=True):
        for hit in answer.get("vulns", ()):
            found.append(_finding(name, pinned[name], _fetch(f"{url}/vulns/{hit['id']}")))
    return found


def search_export(pinned: Mapping[str, str], path: Path) -> list[Finding]:
    """What an export of OSV's database for PyPI knows about these versions."""
    found: list[Finding] = []
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith(".json"):
                advisory = json.loads(archive.read(name))
                for affected in advisory.get("affected", ()):
                    package = canonicalize_name(affected.get("package", {}).get("name", ""))
                    if package in pinned and "withdrawn" not in advisory and _affects(affected, pinned[package]):
                        found.append(_finding(package, pinned[package], advisory))
                        break
    return sorted(found, key=lambda finding: (finding.package, finding.advisory))


def _affects(affected: Mapping[str, Any], version: str) -> bool:
    if version in affected.get("versions", ()):
        return True
    return any(
        _in_range(kind.get("events", ()), version) for kind in affected.get("ranges", ()) if kind["type"] == "ECOSYSTEM"
    )


def _in_range(events: Iterable[Mapping[str, str]], version: str) -> bool:
    """Events in order: from an `introduced` on it is affected, from a `fixed` on it is not."""
    at, inside = Version(version), False
    for event in events:
        kind, bound = next(iter(event.items()))
        try:
            reached = bound == "0" or at >= Version(bound)
            beyond = bound != "0" and at > Version(bound)
        except InvalidVersion:
            continue
        if kind == "introduced" and reached:
            inside = True
        elif (kind == "fixed" and reached) or (kind == "last_affected" and beyond):
            inside = False
    return inside


def _finding(package: str, version: str, advisory: Mapping[str, Any]) -> Finding:
    fixed = {
        event["fixed"]
        for affected in advisory.get("affected", ())
        if canonicalize_name(affected.get("package", {}).get("name", "")) == package
        for kind in affected.get("ranges", ())
        if kind["type"] == "ECOSYSTEM"
        for event in kind.get("events", ())
        if "fixed" in event
    }
    summary = advisory.get("summary") or advisory.get("details", "").partition("\n")[0]
    return Finding(package, version, advisory["id"], summary[:100], ", ".join(sorted(fixed)) or "none yet")


def _fetch(url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except (urllib.error.URLError, TimeoutError, ConnectionError, ValueError) as error:
        raise Unreachable(f"{url}: {error}") from error


def licence(name: str) -> str:
    """What a package says about its licence; the expression, else the classifiers, else the first line of the text."""
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return "not installed"
    if expression := about.get("License-Expression"):
        return expression
    classifiers = [line.rpartition(" :: ")[2] for line in about.get_all("Classifier") or () if "License ::" in line]
    text = (about.get("License") or "").strip().partition("\n")[0]
    return ", ".join(classifiers) or text[:60] or "not stated"


def requirements(pyproject: Path) -> list[Requirement]:
    """What the project asks for, with all its extras."""
    project = tomllib.loads(pyproject.read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    return [asked for asked in map(Requirement, lines) if asked.name != project["name"]]


def needed(asked: Iterable[Requirement]) -> set[str]:
    """Every package that is asked for, directly or through others, on any machine."""
    seen: set[tuple[str, frozenset[str]]] = set()
    todo = [(canonicalize_name(one.name), frozenset(one.extras)) for one in asked]
    while todo:
        name, extras = wanted = todo.pop()
        if wanted in seen:
            continue
        seen.add(wanted)
        try:
            others = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another machine
        for other in map(Requirement, others):
            marker = other.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (*extras, "")):
                todo.append((canonicalize_name(other.name), frozenset(other.extras)))
    return {name for name, _ in seen}


def imported(folders: Iterable[Path]) -> set[str]:
    """Top-level modules that our code imports, by statement or by name."""
    return {name for folder in folders for path in folder.rglob("*.py") for name in _IMPORT.findall(path.read_text())}


def pinned_apart() -> set[str]:
    """Packages that are too heavy for the tests' own environment; slow tests install them into others."""
    parts = tomllib.loads((ROOT / "tests" / "parts.toml").read_text())
    return {canonicalize_name(Requirement(pin).name) for part in parts.values() for pin in part["packages"]}


def unused(direct: set[str], modules: set[str]) -> list[str]:
    """Those of `direct` that provide modules, none of which is imported."""
    provided: dict[str, set[str]] = {}
    for module, names in metadata.packages_distributions().items():
        for name in names:
            provided.setdefault(canonicalize_name(name), set()).add(module)
    return sorted(name for name in direct - NOT_IMPORTED if name in provided and not provided[name] & modules)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make audit", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--database", type=Path, help="an export of OSV's database for PyPI (all.zip)")
    parser.add_argument("--osv", default=OSV, help="where OSV is asked")
    parser.add_argument("--json", type=Path, help="write everything here as well")
    options = parser.parse_args()
    pinned = pins(options.constraints)

    licences = {name: licence(name) for name in pinned}
    for name, said in licences.items():
        print(f"{name:42} {pinned[name]:18} {said}")
    print()
    problems = [
        f"licence of {name}: {said}"
        for name, said in licences.items()
        if COPYLEFT.search(said) and name not in REVIEWED
    ]
    asked = requirements(ROOT / "pyproject.toml")
    direct = {canonicalize_name(one.name) for one in asked}
    wanted = needed(asked)
    problems += [f"{name}=={pinned[name]} is pinned, and nothing needs it" for name in pinned if name not in wanted]
    problems += [f"{name} is needed, and not pinned" for name in sorted(direct - set(pinned) - pinned_apart())]
    problems += [
        f"{name} is in pyproject.toml, and nothing imports it"
        for name in unused(direct, imported(ROOT / folder for folder in ("penstock", "tests", "bench", "deploy")))
    ]
    findings: list[Finding] = []
    unreachable = ""
    try:
        findings = search_export(pinned, options.database) if options.database else ask_osv(pinned, options.osv)
    except Unreachable as error:
        unreachable = str(error)
    problems += [
        f"{found.package} {found.version}: {found.advisory} {found.summary} (mended in: {found.fixed})"
        for found in findings
    ]
    for problem in problems:
        print(f"audit: {problem}")
    if unreachable:
        print(f"audit: NOT CHECKED for vulnerabilities, the advisory database cannot be reached ({unreachable}).")
        print("audit: on a machine that reaches it, or with --database: see the top of deploy/audit.py.")
    else:
        print(f"audit: {len(pinned)} pinned packages, {len(findings)} known vulnerabilities")
    if options.json is not None:
        checked = {"pinned": pinned, "licences": licences, "problems": problems, "advisories_checked": not unreachable}
        options.json.write_text(json.dumps(checked, indent=1))
    return FOUND if problems else UNCHECKED if unreachable else OK


if __name__ == "__main__":
    sys.exit(main())
