"""Two machines can tell whether they have the same checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.engine.loading.digest import checkpoint_digest
from penstock.errors import CheckpointError
from tests.engine.tiny import write_checkpoint


def test_a_copy_is_the_same_whatever_it_is_called_and_a_change_is_noticed(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path / "one")
    whole = checkpoint_digest(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "two"))
    (copy / "README.md").write_text("hello")
    file = copy / "model.safetensors"
    file.rename(copy / "weights.safetensors")
    assert checkpoint_digest(copy) == whole and whole.difference(whole) == ""
    data = bytearray((copy / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "weights.safetensors").write_bytes(data)
    assert "other weights" in whole.difference(checkpoint_digest(copy))
    config = copy / "config.json"
    config.write_text(config.read_text().replace("llama", "mistral"))
    assert "another config.json" in whole.difference(checkpoint_digest(copy))


def test_large_files_are_sampled(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(bytes(5 << 20))
    (tmp_path / "b.gguf").write_bytes(bytes(3 << 20) + b"\1" * 200_000 + bytes((2 << 20) - 200_000))
    assert checkpoint_digest(tmp_path / "a.gguf") != checkpoint_digest(tmp_path / "b.gguf")


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        checkpoint_digest(tmp_path)
