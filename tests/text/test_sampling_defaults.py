"""What a checkpoint's makers recommend, as their files say it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.sampling import SamplingConfig, SamplingDefaults
from penstock.gateway.process.model_follower import sampling_defaults
from penstock.gateway.process.settings import ModelSettings
from penstock.sources.resolve import cache_key
from penstock.text import TextModel
from penstock.text.sampling_defaults import from_generation_config, from_gguf_metadata

CASES: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({}, {}),
    ({"eos_token_id": 2, "transformers_version": "5.0"}, {}),
    (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05},
    ),
    ({"temperature": 1, "max_new_tokens": 2048}, {"temperature": 1.0, "max_tokens": 2048}),
    ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.0}),
    ({"do_sample": None, "temperature": None}, {}),
    # What cannot be used is left out, and the rest still counts.
    ({"temperature": "hot", "top_p": 1.5, "top_k": 2.5, "min_p": True, "repetition_penalty": 1.2},
     {"repetition_penalty": 1.2}),
    ({"temperature": float("nan"), "top_k": -1, "max_new_tokens": 0}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("written", "expected"), CASES)
def test_generation_config(written: dict[str, Any], expected: dict[str, float]) -> None:
    assert from_generation_config(written, "a file").given == expected


def test_gguf_metadata() -> None:
    metadata = {
        "general.architecture": "llama", "general.sampling.temp": 0.5, "general.sampling.top_k": 40,
        "general.sampling.penalty_repeat": 1.1, "general.sampling.mirostat": 2,
    }  # fmt: skip
    assert from_gguf_metadata(metadata, "a file").given == {"temperature": 0.5, "top_k": 40, "repetition_penalty": 1.1}


def test_configuration_then_catalogue_then_checkpoint() -> None:
    class Text:
        sampling = SamplingDefaults(temperature=0.9, top_k=50, min_p=0.1)

    def of(source: str, **asked: Any) -> dict[str, float]:
        settings = ModelSettings("m", source, sampling=SamplingConfig(**asked))
        text: TextModel = Text()  # type: ignore[assignment]
        return sampling_defaults(settings, text).given

    assert of("./folder") == {"temperature": 0.9, "top_k": 50, "min_p": 0.1}
    assert of("./folder", temperature=0.0, max_tokens=64) == {
        "temperature": 0.0, "top_k": 50, "min_p": 0.1, "max_tokens": 64
    }  # fmt: skip
    assert of("smollm2-135m", top_k=0) == {"temperature": 0.2, "top_p": 0.9, "top_k": 0, "min_p": 0.8}
    path = f"/anywhere/{cache_key('smollm2-135m')}/SmolLM2.gguf"
    assert of(path)["temperature"] == 0.2, "where the supervisor found it"
    assert of("smollm2-135m", from_checkpoint=False) == {}
    assert of("smollm2-135m", from_checkpoint=False, top_p=0.5) == {"top_p": 0.5}
