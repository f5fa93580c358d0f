"""Settings of remote models (R-RT-8)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

from penstock.backends.remote.dialects import DIALECTS
from penstock.backends.remote.features import Feature
from penstock.backends.remote.upstream import DialectName, Upstream
from penstock.config.load import load
from penstock.config.remotes import WITHOUT_QUEUE
from penstock.errors import ConfigError
from penstock.supervisor.diagnostics import missing_sources

PAGE = Path(__file__).parents[2] / "docs" / "remotes.md"


def written(tmp_path: Path, **remote: object) -> Path:
    lines = "\n".join(
        f"    {name}: {value}" for name, value in {"model": "m", "urls": "[http://x/v1]", **remote}.items()
    )
    file = tmp_path / "penstock.yaml"
    file.write_text(f"remotes:\n  -\n{lines}\n")
    return file


def test_every_dialect_can_be_configured(tmp_path: Path) -> None:
    assert set(get_args(DialectName)) == set(DIALECTS)
    for name in DIALECTS:
        assert load(written(tmp_path, dialect=name)).remotes[0].dialect == name


def test_a_version_that_looks_like_a_date(tmp_path: Path) -> None:
    assert load(written(tmp_path, dialect="azure", api_version="2024-10-21")).remotes[0].api_version == "2024-10-21"


def test_a_key_file_that_is_not_there_is_found_beforehand(tmp_path: Path) -> None:
    config = load(written(tmp_path, key_file=tmp_path / "key"))
    assert any("remotes[0].key_file" in problem for problem in missing_sources(config))
    (tmp_path / "key").write_text("k")
    assert not any("key_file" in problem for problem in missing_sources(config))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dialect": "opneai"}, "dialect"),
        ({"key_env": "A", "key_file": "/b"}, "one of them"),
        ({"api_version": "1"}, "api_version"),
        ({"dialect": "vllm", "aws_region": "eu"}, "aws_region"),
        ({"dialect": "openai", "max_waiting": 3}, "max_waiting"),
        ({"dialect": "vllm", "streamed": "false"}, "streamed"),
    ],
)
def test_settings_without_meaning_are_refused(tmp_path: Path, settings: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(written(tmp_path, **settings))


def test_queues_are_known_of_all_that_tell_them() -> None:
    silent = {name for name, kind in DIALECTS.items() if kind(Upstream("http://x", "m")).load_call() is None}
    assert set(WITHOUT_QUEUE) == silent | {"ollama"}


def test_the_table_of_features_is_that_of_the_code() -> None:
    found = re.search(r"<!-- features -->\n((?:\|.*\n)+)", PAGE.read_text())
    assert found is not None
    header, _, *rows = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in found.group(1).splitlines())
    assert header[1:] == list(DIALECTS)
    assert [row[0].strip("`") for row in rows] == list(get_args(Feature))
    for row in rows:
        for name, cell in zip(header[1:], row[1:], strict=True):
            assert (cell == "yes") == (row[0].strip("`") in DIALECTS[name].features), (name, row[0])  # type: ignore[index]
