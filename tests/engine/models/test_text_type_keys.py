"""Keys of decoders with configuration classes of their own, inside their wrappers: honoured or refused, as those of
families (`test_config_keys`), whose cases these are."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from penstock.engine.loading.keys import ABSENT
from penstock.engine.models.families import TEXT_TYPES, read_config
from penstock.engine.models.families.config_keys import reference_of
from penstock.errors import CheckpointError, PenstockError
from tests.engine.models.config_walk import PAIRS, PROMPT, SIZES, SKIPPED, SMALL, our_scores, values
from tests.engine.models.test_config_keys import quiet  # noqa: F401 - a fixture
from tests.engine.multimodal import CHECKPOINTS, VISION

CORRECTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 3, "topk_group": 2}
BASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_vl_text": ("qwen2_vl", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen2_5_vl_text": ("qwen2_5_vl", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen2_5_omni_text": ("qwen2_5_omni", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}),
    "qwen3_vl_text": ("qwen3_vl", {"head_dim": 12}),
    "qwen3_vl_moe_text": (
        "qwen3_vl_moe",
        {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "qwen3_omni_moe_text": (
        "qwen3_omni_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "glm4v_text": ("glm4v", {}),
    "glm_ocr_text": ("glm_ocr", {}),
    "glm4v_moe_text": ("glm4v_moe", {**CORRECTED, "n_routed_experts": 6, "routed_scaling_factor": 1.5}),
    "granite4_vision_text": (
        "granite4_vision",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
    ),
    "ernie4_5_vl_moe_text": (
        "ernie4_5_vl_moe",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [16, 8], "moe_num_shared_experts": 1},
    ),
    "paddleocr_vl_text": ("paddleocr_vl", {"head_dim": 8}),
    "hunyuan_vl_text": ("hunyuan_vl", {"head_dim": 8}),
}
SECTIONS: dict[str, list[int]] = {
    "qwen3_vl_text": [2, 2, 2], "qwen3_vl_moe_text": [2, 2, 2], "glm4v_moe_text": [1, 1, 0],
}  # fmt: skip
"""Of the pairs of a head that are rotated, between time, height and width; elsewhere one, one and two."""


def config(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    name, base = BASES[kind]
    wrapper, _, more = CHECKPOINTS[name]
    merged = {**SMALL, "hidden_act": "silu", **base, "model_type": kind, **changes}
    merged.setdefault("rope_parameters", {"rope_type": "default"})
    for key in ("rope_parameters", "rope_scaling"):
        rope = merged.get(key)
        if isinstance(rope, dict) and (rope or key == "rope_parameters"):
            rope = {"mrope_section": SECTIONS.get(kind, [1, 1, 2]), **rope}
            merged[key] = {"mrope_interleaved": True, **rope} if kind.startswith("qwen3_vl") else rope
    text = {key: value for key, value in merged.items() if value is not ABSENT}
    vision = {"vision_config": VISION, **more}
    return {"model_type": wrapper, "tie_word_embeddings": False, **vision, "text_config": text}


def cases(kind: str) -> Iterator[dict[str, Any]]:
    base = config(kind, {})["text_config"]
    for key, default in {**reference_of(kind), **base}.items():
        if key in SKIPPED or key in ("model_type", "tie_word_embeddings", "rope_parameters"):
            continue
        now = base.get(key, default)
        seen = [repr(now)]
        for value in values(key, now):
            left_out = value is ABSENT and (key in SIZES or key not in base)
            if repr(value) not in seen and not left_out:
                seen.append(repr(value))
                yield {key: value}
    yield from (changes for group in PAIRS.values() for changes in group)


def scores(raw: dict[str, Any], folder: Path) -> torch.Tensor:
    """Log-probability of each token after the first, from a checkpoint that the reference writes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    parsed = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(1)
    model = getattr(transformers, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[raw["model_type"]])(parsed).float().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2 if "norm" in name else 0.35)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)


def verdict(raw: dict[str, Any], folder: Path) -> str:
    try:
        read_config(raw)
    except CheckpointError as error:
        return f"refused: {error}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = scores(raw, folder)
    except Exception as error:
        return f"reference failed: {type(error).__name__}: {error}"
    if not bool(expected.isfinite().all()):
        return "reference failed: not a number"
    try:
        found = our_scores(folder)
    except PenstockError as error:
        return f"refused: {error}"
    worst = float((found - expected).abs().max())
    return "equal" if worst < 4e-3 else f"DIFFERENT by {worst:.4f}"


def test_every_text_type_is_walked() -> None:
    assert set(BASES) == set(TEXT_TYPES)


@pytest.mark.parametrize("kind", BASES)
def test_a_value_is_read_or_refused_whatever_it_is(kind: str) -> None:
    """Of every case of the walk: no other exception."""
    outcomes: Counter[str] = Counter()
    for changes in cases(kind):
        try:
            read_config(config(kind, changes))
            outcomes["read"] += 1
        except CheckpointError:
            outcomes["refused"] += 1
    assert outcomes["read"] > 100 and outcomes["refused"] > 50, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("kind", BASES)
def test_every_key_gives_the_references_output_or_is_refused(kind: str, tmp_path: Path) -> None:
    wrong, outcomes = [], Counter[str]()
    for index, changes in enumerate([{}, *cases(kind)]):
        found = verdict(config(kind, changes), tmp_path / str(index))
        outcomes[found.split(":")[0]] += 1
        if not found.startswith(("equal", "refused", "reference failed")):
            wrong.append(f"{kind} {changes}: {found}")
    print(kind, dict(outcomes))
    assert not wrong, "\n".join(wrong)
    assert outcomes["equal"] > 80, outcomes
