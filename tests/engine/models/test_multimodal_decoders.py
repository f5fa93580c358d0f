"""The text decoder of a model that also takes images: its tokens are those of the reference for text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.engine.models.families import FAMILIES, TEXT_TYPES, WRAPPERS, decoder_type, read_config
from penstock.errors import CheckpointError
from tests.engine.adapters.files import merge, write_adapter
from tests.engine.harness import drain, generate, greedy, make_engine
from tests.engine.multimodal import CHECKPOINTS, saved, tiny_model, write_as_named
from tests.engine.quantization import layouts
from tests.engine.tiny import COMMON, Reference, write_checkpoint

PROMPT = [29 * i % 199 for i in range(70)]
QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "cohere2_vision", "hunyuan_vl")


def check(folder: Path, model: Any, **settings: Any) -> None:
    """Greedy tokens and their log-probabilities are the model's: those show scales and caps of logits too."""
    engine = make_engine(folder, **settings)
    engine.submit(greedy("a", PROMPT, 12, logprobs=0))
    deltas = drain(engine)
    tokens = [token for delta in deltas for token in delta.tokens]
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).amax(-1)
    found = torch.tensor([entry.logprob for delta in deltas for entry in delta.logprobs or ()])
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHECKPOINTS]
)
def test_as_published(name: str, tmp_path: Path) -> None:
    check(tmp_path, saved(name, tmp_path))


def _older_llava(name: str) -> str:
    return "language_model." + name.replace("model.language_model.", "model.") if _of_decoder(name) else name


def _older_qwen(name: str) -> str:
    return name.replace("model.language_model.", "model.") if _of_decoder(name) else name.removeprefix("model.")


def _thinker(name: str) -> str:
    return f"thinker.{_older_qwen(name)}"


def _of_decoder(name: str) -> bool:
    return name.startswith(("model.language_model.", "lm_head."))


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("qwen2_vl", str),
        ("qwen2_vl", _older_qwen),
        pytest.param("qwen3_vl_moe", str, marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni", str, marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni", _thinker, marks=pytest.mark.slow),
        pytest.param("glm4v", _older_llava, marks=pytest.mark.slow),
        ("llava", str),
        ("llava", _older_llava),
        pytest.param("idefics3", str, marks=pytest.mark.slow),
        pytest.param("internvl", _older_llava, marks=pytest.mark.slow),
        pytest.param("paddleocr_vl", str, marks=pytest.mark.slow),
        pytest.param("hunyuan_vl", str, marks=pytest.mark.slow),
    ],
)
def test_other_layouts_of_tensors(name: str, rename: Callable[[str], str], tmp_path: Path) -> None:
    model = tiny_model(name)
    check(write_as_named(model, tmp_path, rename), model)
