"""The comparison with transformers: same weights, same work, an honest verdict."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from penstock.bench import compare
from penstock.bench.commands.app import app
from penstock.engine.loading.checkpoint import open_checkpoint
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-mqa-tied", tmp_path_factory.mktemp("tiny"))


def test_the_command_takes_turns_and_prints_the_ratio(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "compare.json"
    arguments = ["compare", "-m", str(folder), "--batch", "2", "--input-len", "20", "--output-len", "8"]
    arguments += ["--rounds", "2", "--threads", "1", "--device", "cpu", "--json", str(file)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Penstock" in result.output and "transformers" in result.output
    results = json.loads(file.read_text())["results"]
    assert len(results["ours"]) == len(results["transformers"]) == 2
    assert results["ratio"] > 0


def test_the_peer_holds_the_checkpoints_own_weights(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    peer = compare.Peer(checkpoint.config, tensors, torch.device("cpu"))
    state = peer.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(state["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_weights_the_peer_does_not_take_are_an_error(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.names()}
    tensors.pop("model.norm.weight")
    with pytest.raises(compare.BenchError, match=r"missing \['model.norm.weight'\]"):
        compare.Peer(checkpoint.config, tensors, torch.device("cpu"))


def test_small_gaps_are_ties() -> None:
    assert compare.verdict(2.0) == "Penstock is 2.00x as fast"
    assert compare.verdict(0.5) == "transformers is 2.00x as fast"
    assert compare.verdict(1.2).startswith("a tie")
    assert compare.verdict(0.85).startswith("a tie")


def test_without_transformers_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(app, ["compare"])
    assert result.exit_code == 2
    assert "pip install transformers" in result.output
