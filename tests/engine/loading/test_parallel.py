"""Tensors that are read before they are asked for: each is there, late or not at all asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.loading import parallel
from penstock.engine.loading.parallel import ParallelReader
from penstock.errors import CheckpointError

CPU = torch.device("cpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({f"layers.{index}.weight": torch.full((64,), float(index)) for index in range(12)}, path)
    return path


def test_reading_goes_on_a_little_ahead_of_what_is_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_AHEAD", 3 * 256)
    reader = ParallelReader({file}, CPU)
    reader.begin()
    assert list(reader._pending) == [f"layers.{index}.weight" for index in range(3)]
    for index in range(12):
        assert torch.equal(reader.tensor(f"layers.{index}.weight"), torch.full((64,), float(index)))
    assert not reader._pending


def test_what_nobody_asks_for_is_dropped_in_the_end(file: Path) -> None:
    reader = ParallelReader({file}, CPU)
    reader.begin()
    assert float(reader.tensor("layers.7.weight")[0]) == 7.0
    reader.end()
    assert not reader._pending
    assert float(reader.tensor("layers.9.weight")[0]) == 9.0, "read by itself"
    assert not reader._pending


def test_a_file_that_is_cut_short_is_noticed_when_its_tensor_is_asked_for(file: Path) -> None:
    reader = ParallelReader({file}, CPU)
    with open(file, "r+b") as stream:
        stream.truncate(file.stat().st_size - 100)
    reader.begin()
    assert float(reader.tensor("layers.0.weight")[0]) == 0.0
    with pytest.raises(CheckpointError, match="cut short"):
        reader.tensor("layers.9.weight")  # behind it in the file: by name
