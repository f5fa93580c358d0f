"""HTTP servers beside each other: real processes, in small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.libraries.http_servers import HttpServersBenchSettings, main
from penstock.errors import ConfigError


@pytest.mark.slow
def test_every_server_answers_short_requests_and_streams(tmp_path: Path) -> None:
    pytest.importorskip("granian")
    file = tmp_path / "servers.json"
    main(HttpServersBenchSettings(seconds=0.3, rounds=1, at_once=4), file, Console(quiet=True))
    results = json.loads(file.read_text())["results"]
    assert set(results) == {"short", "stream"}
    for figures in results.values():
        assert set(figures) == {"penstock", "uvicorn", "granian"}
        assert all(figure["per_s"][0] > 0 for figure in figures.values())


def test_an_unknown_server_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="there are: penstock, uvicorn, granian"):
        main(HttpServersBenchSettings(servers=("apache",)), None, Console(quiet=True))
