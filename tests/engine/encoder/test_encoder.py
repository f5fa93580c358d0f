"""Encoders give what the reference implementation gives, whatever shares their batch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from penstock.engine.encoder.config import EncoderEngineConfig
from penstock.engine.encoder.core import EncoderEngine
from penstock.engine.encoder.request import EncodeRequest, Wanted
from penstock.engine.request import QUEUE_FULL, Request, SamplingParams
from penstock.errors import CheckpointError, ConfigError
from penstock.text.encoder import load_encoder_text

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 80,
    "max_position_embeddings": 64, "initializer_range": 0.4,
}  # fmt: skip
TEXTS = [[1, 5, 9, 2], [1, 7, 7, 7, 30, 2], [1, 2], [1, 8, 3, 2], [1, *range(3, 60), 2]]


def load(folder: Path, **options: Any) -> EncoderEngine:
    return EncoderEngine.load(EncoderEngineConfig(str(folder), threads=1, **options))


def run(engine: EncoderEngine, *requests: EncodeRequest) -> dict[str, np.ndarray[Any, Any] | str]:
    """Numbers, or why there are none, by request."""
    for request in requests:
        engine.encode(request)
    found: dict[str, np.ndarray[Any, Any] | str] = {}
    while engine.has_work:
        output = engine.step()
        assert output is not None
        found |= {delta.request_id: delta.error or "" for delta in output.deltas}
        found |= {done.request_id: np.frombuffer(done.numbers, np.float32) for done in output.encodings}
    return found


def numbers(engine: EncoderEngine, texts: Sequence[list[int]], wanted: Wanted = "sentence") -> np.ndarray[Any, Any]:
    found = run(engine, EncodeRequest("x", list(texts), wanted))["x"]
    assert not isinstance(found, str), found
    return found


def states(model: Any, ids: list[int], second: int | None = None) -> torch.Tensor:
    kinds = [int(second is not None and place >= second) for place in range(len(ids))]
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids]), token_type_ids=torch.tensor([kinds])).last_hidden_state[0]
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    model = transformers.BertModel(transformers.BertConfig(**SHAPE)).eval()
    model.save_pretrained(folder)
    return folder, model


def test_minilm_gives_the_reference_vectors(encoder_model: Path) -> None:
    text = load_encoder_text(encoder_model)
    sentences = [
        "The cat sits outside.",
        "A man plays the guitar",
        "x",
        "Quarterly revenue rose by 12% to $4.2bn. " * 18,
    ]
    ids = text.encode(sentences)
    reference = transformers.AutoModel.from_pretrained(encoder_model).eval()
    engine = load(encoder_model)
    got = numbers(engine, ids).reshape(len(ids), -1)
    assert engine.info.dimensions == got.shape[1] == 384
    for row, tokens in zip(got, ids, strict=True):
        expected = F.normalize(states(reference, tokens).mean(0), dim=-1)
        assert np.abs(row - expected.numpy()).max() < 1e-5


def test_eight_bits_give_nearly_the_same_vectors(encoder_model: Path) -> None:
    ids = load_encoder_text(encoder_model).encode(
        ["The cat sits outside.", "x", "How do I read a file line by line?", "Quarterly revenue rose by 12%. " * 18]
    )
    exact = numbers(load(encoder_model), ids).reshape(len(ids), -1)
    rounded = numbers(load(encoder_model, weights="int8"), ids).reshape(len(ids), -1)
    assert (exact * rounded).sum(axis=1).min() > 0.999 and not np.array_equal(exact, rounded)
    with pytest.raises(ConfigError, match="float32 beside them"):
        load(encoder_model, weights="int8", dtype="bfloat16")


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("budget", [1, 16, 4096])
def test_sentences_equal_the_reference_in_batches_of_any_size(
    tiny: tuple[Path, Any], tmp_path: Path, pooling: str, budget: int
) -> None:
    folder, model = tiny
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").mkdir()
    mode = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token"}[pooling]
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({mode: True, "word_embedding_dimension": 48}))
    engine = load(tmp_path, token_budget=budget)
    got = numbers(engine, TEXTS).reshape(len(TEXTS), -1)
    for row, tokens in zip(got, TEXTS, strict=True):
        hidden = states(model, tokens)
        pooled = hidden.mean(0) if pooling == "mean" else hidden[0]
        assert np.abs(row - F.normalize(pooled, dim=-1).numpy()).max() < 1e-5


def test_tokens_and_late_interaction_equal_the_reference(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    engine = load(folder, token_budget=8)
    vectors = [F.normalize(states(model, tokens), dim=-1) for tokens in TEXTS]
    assert np.abs(numbers(engine, TEXTS, "tokens") - torch.cat(vectors).flatten().numpy()).max() < 1e-5
    query, *documents = (found[1:-1] for found in vectors)
    expected = [(query @ found.T).max(1).values.mean().item() if len(found) else 0.0 for found in documents]
    assert np.abs(numbers(engine, TEXTS, "late") - np.array(expected)).max() < 1e-5


def test_a_cross_encoder_scores_pairs_as_the_reference_does(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SHAPE, num_labels=1)).eval()
    model.save_pretrained(tmp_path)
    engine = load(tmp_path)
    assert engine.info.scores
    seconds = [2, 4, 1, 3, 30]
    got = run(engine, EncodeRequest("x", TEXTS, "score", seconds))["x"]
    for number, tokens, second in zip(got, TEXTS, seconds, strict=True):
        kinds = torch.tensor([[int(place >= second) for place in range(len(tokens))]])
        with torch.inference_mode():
            expected = model(torch.tensor([tokens]), token_type_ids=kinds).logits.item()
        assert abs(float(number) - expected) < 1e-4
    assert "scores pairs" in run(engine, EncodeRequest("y", TEXTS))["y"]


def test_a_bad_request_fails_alone(tiny: tuple[Path, Any]) -> None:
    engine = load(tiny[0], max_waiting=6)
    good = EncodeRequest("good", TEXTS)
    found = run(
        engine,
        good,
        EncodeRequest("long", [[1] * 65]),
        EncodeRequest("foreign", [[1, 97, 2]]),
        EncodeRequest("empty", []),
        EncodeRequest("pair", [[1, 2, 3]], "score"),
        EncodeRequest("crowd", [[1, 2]] * 2),
    )
    assert isinstance(found["good"], np.ndarray)
    assert "65 tokens" in found["long"] and "64" in found["long"]
    assert "vocabulary" in found["foreign"]
    assert "no text" in found["empty"]
    assert "no cross-encoder" in found["pair"]
    assert str(found["crowd"]).startswith(QUEUE_FULL)
    engine.submit(Request("tokens", [1], SamplingParams()))
    output = engine.step()
    assert output is not None and "does not generate" in (output.deltas[0].error or "")


def test_an_aborted_request_is_not_computed(tiny: tuple[Path, Any]) -> None:
    engine = load(tiny[0], token_budget=4)
    engine.encode(EncodeRequest("a", TEXTS))
    engine.step()
    engine.abort("a")
    output = engine.step()
    assert output is not None and output.deltas[0].finish_reason == "abort"
    assert not engine.has_work and engine.load_snapshot().waiting == 0


def test_what_it_cannot_run_is_said_when_loading(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="64 positions"):
        load(tiny[0], max_model_len=65)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "model.safetensors").write_bytes((tiny[0] / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="'llama' is not an encoder"):
        load(tmp_path)
