"""One place picks a device and its backend; what a device cannot do is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.engine.backends import cpu, select
from penstock.engine.backends.cpu.backend import CpuBackend
from penstock.engine.backends.cpu.executor import RecordedExecutor
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.speculative.draft import DraftProposer
from penstock.errors import ConfigError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

CPU = torch.device("cpu")
REQUESTS = [greedy(f"r{length}", [(7 * at + length) % 199 for at in range(length)], 12) for length in (1, 5, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("select") / "model")


@pytest.mark.parametrize(
    ("name", "problem"),
    [("gpu 7", "not a device name"), ("meta", "not supported"), ("cuda", "torch sees no CUDA device")],
)
def test_devices_that_cannot_be_used_are_refused(name: str, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=problem):
        select.pick_device(name)


def test_auto_takes_a_cuda_device_with_enough_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    assert select.pick_device("auto", room=1000) == torch.device("cuda", 0)
    assert select.pick_device("auto", room=1001) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select.pick_device("auto") == CPU


def test_every_rank_has_its_own_cuda_device_and_shares_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert select.rank_device(CPU, 3, 4) == CPU
    assert select.rank_device(torch.device("cuda", 1), 2, 3) == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match="torch sees 4 in all"):
        select.rank_device(torch.device("cuda", 1), 3, 4)


def test_without_native_kernels_the_reference_takes_over(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda threads: None)
    backend = select.pick_backend(CPU, 1)
    assert type(backend) is ReferenceBackend
    for settings, problem in (
        ({"weights": "int8"}, "native CPU kernels"),
        ({"weights": "fp8"}, "native CPU kernels"),
        ({"activations": "int8"}, "int8 or int4 blocks"),
        ({"deterministic": True}, "native kernels"),
    ):
        with pytest.raises(ConfigError, match=problem):
            make_engine(folder, **settings)
    engine = make_engine(folder)
    assert type(engine.runner.executor) is EagerExecutor
    reference = generate(engine, *REQUESTS)
    monkeypatch.undo()
    if cpu.status().available:
        native = make_engine(folder)
        assert isinstance(native.runner.backend, CpuBackend) and isinstance(native.runner.executor, RecordedExecutor)
        assert generate(native, *REQUESTS) == reference


@pytest.mark.skipif(not cpu.status().available, reason="no native kernels here")
def test_a_draft_model_shares_the_backend_of_its_target(folder: Path) -> None:
    engine = make_engine(folder, speculation="draft", draft_model=str(folder))
    assert engine.speculation is not None and isinstance(engine.speculation.proposer, DraftProposer)
    assert engine.speculation.proposer.runner.backend is engine.runner.backend


def test_host_memory_is_measured_as_the_system_reports_it() -> None:
    memory = ReferenceBackend().memory
    assert 0 < memory.used() < memory.total() and 0 < memory.available() <= memory.total()
    assert memory.peak(lambda: pytest.fail("steps need not be run to be measured on the host")) == 0
