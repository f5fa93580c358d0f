"""Few-bit checkpoints of models that no family describes: tokens are those of the values, in less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from penstock.engine.models.transformers import read
from tests.engine.foreign import without_families, write_foreign
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.quantization.layouts import write
from tests.engine.tiny import Reference

PROMPTS = ([7, 1, 190, 33, 4], list(range(40, 75)), [11] * 9)


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


def is_linear(name: str) -> bool:
    return name.endswith(".weight") and not any(part in name for part in ("norm", "ln_", "wte", "wpe", "embed"))


def is_conv(name: str) -> bool:
    return is_linear(name) and any(f".{part}." in name for part in ("c_attn", "c_proj", "c_fc"))


CASES = [
    pytest.param("gpt2", "gptq-act-order", {"turned": is_conv}, id="gpt2-gptq-act-order"),
    *(
        pytest.param(model_type, layout, {}, marks=pytest.mark.slow)
        for model_type in ("starcoder2", "bloom", "gpt_neox")
        for layout in ("gptq", "awq", "packed-zero-point", "int8", "fp8", "fp8-tiles")
    ),
    pytest.param("gpt2", "int8", {"turned": is_conv}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("model_type", "layout", "options"), CASES)
def test_tokens_are_those_of_the_values(model_type: str, layout: str, options: dict[str, Any], tmp_path: Path) -> None:
    dense = write_foreign(model_type, tmp_path / "dense")
    few, same, values = write(dense, layout, tmp_path / "stored", is_linear=is_linear, **options)
    assert len(values) >= 8
    given: list[str] = []

    def noted(*arguments: Any) -> dict[str, Any]:
        found = plain_values(*arguments)
        given.extend(found)
        return found

    plain_values = read._values
    with patch.object(read, "_values", noted):
        engine = make_engine(few)
    assert given and not any(name in values for name in given), "the library gets no values of linears"
    whole = make_engine(same, weights="dense")
    outputs = generate(engine, *(greedy(str(i), prompt, 12) for i, prompt in enumerate(PROMPTS)))
    reference = Reference(same)
    for i, prompt in enumerate(PROMPTS):
        assert reference.agrees(prompt, outputs[str(i)], tie=0.02)
    assert_idle(engine)
    assert engine.info.runs_through == "transformers"

    def size(decoder: Any) -> int:
        return sum(linear.weight_bytes for layer in decoder.layers for linear in layer.linears)

    assert size(engine.runner.decoder) < 0.32 * size(whole.runner.decoder)
    assert (
        generate(make_engine(few, weights="dense"), greedy("r", PROMPTS[1], 12))["r"]
        == (generate(whole, greedy("r", PROMPTS[1], 12))["r"])
    )
