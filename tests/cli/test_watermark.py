"""`penstock watermark`: writing a secret, and looking for a watermark in a file or in standard input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.engine.noise import uniforms
from penstock.engine.watermark import WatermarkState
from penstock.identity.watermark import WatermarkKeys
from tests.scripted import make_text


def test_detect(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    text, secret = make_text(tmp_path / "model"), tmp_path / "secret"
    run = CliRunner().invoke
    assert run(app, ["watermark", "secret", str(secret)]).exit_code == 0
    keys = WatermarkKeys.read(str(secret))
    assert keys is not None
    letters = np.array(text.encode("abcdefghijklmnopqrstuvwxyz ", special=False, add_special_tokens=False))
    state, tokens = WatermarkState(keys.marking("acme"), 9, 0), [int(letters[0])]
    while len(tokens) < 150:
        [key] = state.keys(tokens, (), len(tokens), np.array([len(tokens)], np.int64))
        tokens.append(int(letters[uniforms(np.full(len(letters), key), letters).argmax()]))
    marked, plain = tmp_path / "marked.txt", tmp_path / "plain.txt"
    marked.write_text(text.decode(tokens))
    plain.write_text("The quick brown fox jumps over the lazy dog, and other sentences that nobody has marked. " * 3)
    config = tmp_path / "penstock.yaml"
    config.write_text(f"models: [{{name: m, source: {tmp_path / 'model'}}}]\nwatermark: {{secret_file: {secret}}}\n")
    common = ["-c", str(config), "--tenant", "acme"]
    found = run(app, ["watermark", "detect", str(marked), *common, "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.output)["verdict"] == "watermarked" and json.loads(found.output)["p_value"] < 1e-9
    shown = run(app, ["watermark", "detect", str(plain), *common])
    assert shown.exit_code == 1 and shown.output.startswith("not detected: p-value")
    assert run(app, ["watermark", "detect", "-", *common], input="short").exit_code == 3
    assert run(app, ["watermark", "detect", "-", "-c", str(config)], input=marked.read_text()).exit_code == 1
    assert secret.read_text().strip() not in found.output + shown.output
    refused = run(app, ["watermark", "detect", str(plain)])
    assert "watermark.secret_file" in str(refused.exception)
