"""Our GGUF reader beside the gguf package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.libraries.gguf_reader import GgufReaderBenchSettings, main
from penstock.errors import ConfigError


def test_both_readers_find_the_same(default_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "gguf.json"
    main(GgufReaderBenchSettings(str(default_model), rounds=1), file, Console(quiet=True))
    results = json.loads(file.read_text())["results"]
    ours, theirs = results["penstock"][0], results["gguf"][0]
    assert ours["digest"] == theirs["digest"] and ours["tensors"] == 272
    assert ours["open_s"] < theirs["open_s"]


def test_a_folder_is_not_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        main(GgufReaderBenchSettings(str(tmp_path)), None, Console(quiet=True))
