"""`penstock quantize`: from a folder to a folder that serves, with figures; mistakes are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.text.loader import load_text
from tests.cli.command import penstock
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

ONE_THREAD = ("--device", "cpu", "--threads", "1")
TEXT = "a quick test of the calibration and of the judgement " * 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of single letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = write_checkpoint("llama-gqa", tmp_path_factory.mktemp("cli") / "tiny", spread=0.3)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:199]
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.mark.slow
def test_a_model_is_quantized_measured_and_served(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    command = [sys.executable, "-m", "penstock", "quantize", str(model), "--to", "gptq-int4", *ONE_THREAD]
    texts = ["--calibration", "text.txt", "--text", "text.txt"]
    done = subprocess.run([*command, *texts], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tiny-gptq-int4"
    assert done.stdout.strip() == folder.name
    for word in ("before", "round to nearest, groups of 32", "gptq-int4", "calibrating 3/3"):
        assert word in done.stderr
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["group_size"] == 32
    assert load_text(folder).encode(TEXT) == load_text(model).encode(TEXT)
    assert len(generate(make_engine(folder), greedy("a", [3, 1, 4], 6))["a"]) == 6


def test_mistakes_are_one_line(model: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for arguments, word in (
        (("--out", "full"), "not empty"),
        (("--to", "awq-int4", "--act-order"), "--act-order"),
        (("--group-size", "128"), "groups of 128"),
    ):
        done = penstock("quantize", str(model), *arguments, *ONE_THREAD, "--no-perplexity", cwd=tmp_path)
        assert done.returncode != 0 and word in done.stderr and "Traceback" not in done.stderr, done.stderr
