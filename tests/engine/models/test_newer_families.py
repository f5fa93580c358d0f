"""A.X K2, Hunyuan 4 and HRM-Text: names of tensors in files and in memory, experts outside of the best groups, and what
is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.engine.models.families import read_config
from penstock.errors import CheckpointError, ConfigError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint

PROMPT = [(j * 31 + 7) % 199 for j in range(60)]
FAMILIES = ("axk2", "hy-v4", "hrm-text", "mimo-v2-flash", "laguna", "mistral-large4", "glm5-next")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_in_files_and_in_memory(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path / "files")
    wanted = generate(make_engine(folder), greedy("a", PROMPT, 6))
    memory = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert memory.state_dict().keys() != load_file(folder / "model.safetensors").keys()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/config.json").write_text((folder / "config.json").read_text())
    save_file({name: part.clone() for name, part in memory.state_dict().items()}, tmp_path / "memory/model.safetensors")
    assert generate(make_engine(tmp_path / "memory"), greedy("a", PROMPT, 6)) == wanted


def test_an_expert_outside_of_the_best_groups_goes_before_one_that_scores_below_zero(tmp_path: Path) -> None:
    folder = write_checkpoint("axk2", tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("e_score_correction_bias"):
            # The best groups have one good expert each.
            tensors[name] = torch.where(torch.arange(len(tensor)) % 2 == 0, 1.0, -2.0)
    save_file(tensors, file, metadata={"format": "pt"})
    tokens = generate(make_engine(folder), greedy("a", PROMPT, 8))["a"]
    assert Reference(folder).agrees(PROMPT, tokens)


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("hy-v4", {"speculation": "mtp"}, "no MTP layer"),
        ("minimax-m3", {"speculation": "mtp"}, "no MTP layer"),
        ("mistral-large4", {"speculation": "mtp"}, "no MTP layer"),
        ("muse-glimmer", {"speculation": "mtp"}, "no MTP layer"),
        ("muse-spark", {"speculation": "mtp"}, "no MTP layer"),
        ("glm5-next", {"speculation": "mtp"}, "no MTP layer"),
        ("hrm-text", {"speculation": "mtp"}, "not available for hrm_text models, whose layers run several times"),
    ],
)
def test_what_they_do_not_have_is_refused(family: str, settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    with pytest.raises(ConfigError, match=message):
        make_engine(folder, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "axk2", "n_group": 2, "topk_group": None}, "must be set together"),
        ({"model_type": "hy_v4", "swiglu_limit": 0.0}, "swiglu_limit is 0"),
        ({"model_type": "hy_v4", "indexer_types": ["shared", "full"]}, "the first layer must have an indexer"),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_run(changes: dict[str, Any], message: str) -> None:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    with pytest.raises(CheckpointError, match=message):
        read_config(sizes | changes)
