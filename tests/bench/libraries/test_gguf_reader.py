"""Our GGUF reader beside the gguf package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from penstock.bench.libraries.gguf_reader import GgufReaderBenchSettings, main
from penstock.errors import ConfigError
from tests.engine.loading.gguf_files import write_gguf


def test_both_readers_find_the_same(tmp_path: Path) -> None:
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["<s>", "a", "日本"]}
    model = write_gguf(tmp_path / "small.gguf", metadata, {"a.weight": np.ones((4, 64), dtype=np.float32)})
    ours, theirs = readings(model, tmp_path)
    assert ours["digest"] == theirs["digest"] and ours["tensors"] == 1


@pytest.mark.slow
def test_ours_opens_the_default_model_faster(default_model: Path, tmp_path: Path) -> None:
    ours, theirs = readings(default_model, tmp_path)
    assert ours["digest"] == theirs["digest"] and ours["tensors"] == 272
    assert ours["open_s"] < theirs["open_s"]


def readings(model: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    main(GgufReaderBenchSettings(str(model), rounds=1), folder / "gguf.json", Console(quiet=True))
    results = json.loads((folder / "gguf.json").read_text())["results"]
    return results["penstock"][0], results["gguf"][0]


def test_a_folder_is_not_a_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        main(GgufReaderBenchSettings(str(tmp_path)), None, Console(quiet=True))
