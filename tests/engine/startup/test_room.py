"""Models that do not fit: refused with both numbers, before the system has to end a process for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.bench import shapes
from penstock.engine.backends.host_memory import HostMemory
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint, stored_elements
from penstock.errors import ConfigError
from tests.engine.gpt_oss_files import write_mxfp4
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.quantization.layouts import write
from tests.engine.tiny import write_checkpoint


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has so many bytes of memory free."""
    return lambda size: monkeypatch.setattr(HostMemory, "available", lambda self: size)


class Unread(RandomCheckpoint):
    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        raise AssertionError(f"{name} was read")


@pytest.mark.parametrize(
    ("settings", "least", "advice"),
    [
        ({"dtype": "float32", "weights": "dense"}, 29.92, r"model, fewer bits \(weights: int8 or int4\) or"),
        ({"weights": "int8"}, 7.48, r"model, fewer bits \(weights: int4\) or"),
        ({"weights": "int4"}, 3.74, "model or"),
    ],
)
def test_weights_that_memory_cannot_hold_are_not_read(
    leave: Callable[[int], None], settings: dict[str, Any], least: float, advice: str
) -> None:
    leave(3 << 30)
    config = EngineConfig(model="big", device="cpu", threads=1, num_blocks=20, **settings)
    message = f"weights of big take at least {least} GiB, and 3.00 GiB of memory are free; choose a smaller {advice}"
    with pytest.raises(ConfigError, match=message):
        Engine.load(config, checkpoint=Unread(shapes.named("llama-8b")))


@pytest.mark.parametrize(("stored", "bits"), [("float32", 32), ("gptq", 4), ("fp8", 4), ("mxfp4", 4)])
def test_what_just_fits_is_served(tmp_path: Path, leave: Callable[[int], None], stored: str, bits: int) -> None:
    if stored == "mxfp4":
        folder = write_mxfp4(tmp_path)
    else:
        folder = write_checkpoint("llama-gqa", tmp_path / "dense")
    if stored in ("gptq", "fp8"):
        folder = write(folder, stored, tmp_path)[0]
    config = json.loads((folder / "config.json").read_text())
    size = stored_elements({name: value for name, value in config.items() if name != "quantization_config"}) * bits // 8
    leave(size - 1)
    with pytest.raises(ConfigError, match="take at least"):
        make_engine(folder, num_blocks=20)
    leave(size)
    assert len(generate(make_engine(folder, num_blocks=20), greedy("r", [1, 2, 3], 4))["r"]) == 4


def test_a_host_tier_that_memory_cannot_hold_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    with pytest.raises(ConfigError, match=r"host_memory: 1048576\.00 GiB are more than the .* GiB that are free"):
        make_engine(folder, num_blocks=20, host_memory=1 << 50)


def test_an_engine_has_as_many_threads_as_it_may_use_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, before = write_checkpoint("llama-gqa", tmp_path), torch.get_num_threads()
    monkeypatch.setattr("penstock.engine.startup.part.usable_cores", lambda: 3)
    try:
        make_engine(folder, threads=None, num_blocks=20)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_device_that_is_full_says_so(leave: Callable[[int], None]) -> None:
    class Full(RandomCheckpoint):
        def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
            if ".1." in name:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
            return super().tensor(name, device)

    config = EngineConfig(model="m", device="cpu", dtype="float32", threads=1, num_blocks=20)
    leave(5 << 30)
    with pytest.raises(ConfigError, match=r"weights of m do not fit on cpu, .* and 5\.00 GiB left of it; choose more"):
        Engine.load(config, checkpoint=Full(shapes.named("smollm2-135m:2")))
