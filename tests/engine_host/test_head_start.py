"""What is begun before imports are done: hints, of which none may be wrong or fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.config import EngineConfig
from penstock.engine_host import head_start


def test_the_weights_of_a_folder_or_a_file_are_read_ahead(tmp_path: Path) -> None:
    for name, size in (("a.safetensors", 100), ("b.safetensors", 50), ("config.json", 7)):
        (tmp_path / name).write_bytes(bytes(size))
    assert head_start.read_ahead(tmp_path) == 150
    assert head_start.read_ahead(tmp_path / "a.safetensors") == 100
    assert head_start.read_ahead(tmp_path / "missing") == 0


@pytest.mark.parametrize(
    ("device", "number"), [("auto", 0), ("cuda", 0), ("cuda:3", 3), ("cpu", None), ("cuda:x", None), ("", None)]
)
def test_the_gpu_that_will_be_used(device: str, number: int | None) -> None:
    assert head_start.cuda_device(device) == number


def test_a_context_is_made_only_for_an_engine_of_one_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(head_start, "_on_thread", lambda name, work: begun.append(name))
    monkeypatch.setattr(head_start, "torch_has_cuda", lambda: True)
    for config, expected in (
        (EngineConfig(model=str(tmp_path), device="cuda:1"), ["read ahead", "CUDA context"]),
        (EngineConfig(model=str(tmp_path), device="cpu"), ["read ahead"]),
        (EngineConfig(model=str(tmp_path), device="cuda", tensor_parallel=2), ["read ahead"]),
    ):
        begun.clear()
        head_start.begin(config)
        assert begun == expected


def test_libraries_are_loaded_as_an_import_will_load_them(tmp_path: Path) -> None:
    assert [path.name for path in head_start.libraries()][-1:] == ["libtorch_cpu.so"]
    import _socket

    assert head_start.load_libraries([Path(_socket.__file__)])
    assert not head_start.load_libraries([tmp_path / "missing.so"])


def test_libraries_find_what_they_read_from_the_environment() -> None:
    """The libraries look there once, when they are loaded, which is before most of the engine is."""
    program = (
        "import os, sys; from penstock.engine_host import head_start\n"
        "head_start._on_thread = lambda name, work: print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)\n"
        "head_start.begin_libraries()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["300", "False"]


def test_without_a_driver_or_a_gpu_there_is_no_context() -> None:
    assert not head_start.make_context(1000)
