"""Keys of an encoder's files: what changes the reference's vectors is honoured or refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from penstock.engine.encoder.config import read_shape
from penstock.engine.loading.keys import ABSENT
from penstock.engine.models.families.config_keys import reference_of
from penstock.errors import CheckpointError, PenstockError
from tests.engine.encoder.test_encoder import SHAPE, TEXTS, load, numbers, states
from tests.engine.models.config_walk import SIZES, SKIPPED, values

BASE: dict[str, Any] = {"model_type": "bert", **SHAPE, "layer_norm_eps": 1e-6, "type_vocab_size": 2}
SPECIAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("relu", "silu", "gelu_new", "gelu_pytorch_tanh", ABSENT),
    "position_embedding_type": ("absolute", "relative_key"),
    "architectures": (None, ["BertModel"], ["BertForMaskedLM"]),
    "max_position_embeddings": (96, 128, ABSENT),
}


def cases() -> Iterator[dict[str, Any]]:
    for key, default in {**reference_of("bert"), **BASE, "position_embedding_type": ABSENT}.items():
        if key in SKIPPED or key == "model_type":
            continue
        now = BASE.get(key, default)
        for value in SPECIAL.get(key) or values(key, now):
            if repr(value) != repr(now) and not (value is ABSENT and (key not in BASE or key in SIZES)):
                yield {key: value}


def verdict(changes: dict[str, Any], folder: Path) -> str:
    config = {key: value for key, value in (BASE | changes).items() if value is not ABSENT}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    try:
        parsed = transformers.AutoConfig.from_pretrained(folder)
        parsed.dtype = None
        torch.manual_seed(3)
        model = transformers.AutoModel.from_config(parsed, dtype=torch.float32).eval()
        expected = torch.cat([F.normalize(states(model, text), dim=-1) for text in TEXTS]).flatten().numpy()
        model.save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
    except Exception as error:
        return f"reference failed: {error}"
    try:
        found = numbers(load(folder), TEXTS, "tokens")
    except PenstockError as error:
        return f"refused: {error}"
    worst = float(np.abs(found - expected).max()) if found.shape == expected.shape else 9.0
    return "equal" if worst < 1e-4 else f"DIFFERENT by {worst:.4f}"


@pytest.mark.parametrize(
    "changes", [{}, {"layer_norm_eps": ABSENT}, {"type_vocab_size": ABSENT}, {"type_vocab_size": 3}]
)
def test_honoured(changes: dict[str, Any], tmp_path: Path) -> None:
    assert verdict(changes, tmp_path / "model") == "equal"


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "relu"},
        {"is_decoder": True},
        {"is_causal": True},
        {"add_cross_attention": True},
        {"position_embedding_type": "relative_key"},
    ],
)
def test_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{next(iter(changes))} is .*, which BERT encoders do not support"):
        read_shape(tmp_path, BASE | changes)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "Dense is not supported; supported: Trans"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is True"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "pooling_mode is 'lasttoken'"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "pools by"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case is True"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name is 'query'"),
    ],
)
def test_files_of_sentence_transformers(file: str, content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        read_shape(tmp_path, BASE)


def test_newer_files_name_the_pooling(tmp_path: Path) -> None:
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "cls", "embedding_dimension": 48}))
    assert read_shape(tmp_path, BASE).pooling == "cls"


def test_a_cross_encoder_has_one_output(tmp_path: Path) -> None:
    """Where the labels are left out the reference has two."""
    for labels, message in (
        ({}, "2 labels"),
        ({"num_labels": 3}, "3 labels"),
        ({"id2label": {"0": "a", "1": "b"}}, "2 "),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_shape(tmp_path, BASE | {"architectures": ["BertForSequenceClassification"], **labels})
    one = BASE | {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    assert read_shape(tmp_path, one).scores


@pytest.mark.slow
def test_every_key_gives_the_references_vectors_or_is_refused(tmp_path: Path) -> None:
    wrong, outcomes = [], Counter[str]()
    for index, changes in enumerate(cases()):
        found = verdict(changes, tmp_path / str(index))
        outcomes[found.split(":")[0]] += 1
        if not found.startswith(("equal", "refused", "reference failed")):
            wrong.append(f"{changes}: {found}")
    print(dict(outcomes))
    assert not wrong, "\n".join(wrong)
    assert outcomes["equal"] > 50
