"""Engines side by side: the worker's pipe, and what is said about peers that are not here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from penstock.bench.peers.cpu import CpuPeersBenchSettings, PeerWorkload, find, main
from penstock.engine.backends import cpu
from penstock.errors import ConfigError


@pytest.mark.slow
def test_our_engine_runs_behind_the_pipe(default_model: Path, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    settings = CpuPeersBenchSettings(
        threads=1, model=str(default_model), workloads=("ttft128",), rounds=1, peers=("none",)
    )
    main(settings, file, Console(quiet=True))
    results = json.loads(file.read_text())["results"]
    assert results["ttft128"]["medians"]["penstock"] > 0
    assert results["start to ready"]["medians"]["penstock"] > 0


def test_a_peer_that_is_not_here_is_named_with_the_reason() -> None:
    peers, missing = find({"vllm": sys.executable}, None)
    assert peers[0].name == "penstock"
    assert any(reason.startswith("openvino: ") for reason in missing)


def test_an_unknown_workload_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match="unknown workload 'c2'; there are: c1, c16"):
        main(CpuPeersBenchSettings(threads=1, workloads=("c2",)), None, Console(quiet=True))


def test_a_lesser_instruction_set_is_one_of_this_machines() -> None:
    with pytest.raises(ConfigError, match="unknown instruction set 'native'; there are: generic, "):
        main(CpuPeersBenchSettings(threads=1, isa="native"), None, Console(quiet=True))


@pytest.mark.slow
def test_our_engine_computes_as_on_a_lesser_cpu() -> None:
    """In a process of its own, as the worker is: PyTorch and our kernels are limited before they are loaded."""
    code = (
        "from penstock.bench.peers.worker import limit; limit('avx2'); import torch; "
        "from penstock.engine.backends import cpu; print(torch.backends.cpu.get_cpu_capability(), cpu.status().isa)"
    )
    if not cpu.status("avx2").available:
        pytest.skip(cpu.status("avx2").detail)
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["AVX2", "avx2"]


def test_figures_of_a_workload() -> None:
    assert PeerWorkload(4, 2, 128, 64, "output tok/s").figure(2.0, [0.1]) == 128
    assert PeerWorkload(4, 2, 128, 1, "prompt tok/s").figure(2.0, [0.1]) == 256
    assert PeerWorkload(3, 1, 128, 1, "ms to first token").figure(2.0, [0.1, 0.3, 0.2]) == 200
