"""Rotary tables are those of `transformers`, for every scaling and to the end of a 128K context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from penstock.engine.models.families.phi3 import PHI3
from penstock.engine.models.layers.rotary import cos_sin_table
from penstock.engine.models.rope import read_rope
from penstock.errors import CheckpointError

CPU = torch.device("cpu")
POSITIONS = 131_072
COMPARED = torch.cat((torch.arange(2048), torch.arange(2048, POSITIONS, 61), torch.arange(POSITIONS - 64, POSITIONS)))
"""The reference takes long for all of them."""
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    },
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 24.0, "beta_slow": 2.0, "attention_factor": 0.9},
    "yarn-exact-ends": {**YARN, "truncate": False},
    "yarn-mscale": {**YARN, "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.3},
}  # fmt: skip


def compare(ours: torch.Tensor, theirs: tuple[torch.Tensor, torch.Tensor]) -> None:
    half = ours.shape[1] // 2
    for mine, reference in ((ours[:, :half], theirs[0][0, :, :half]), (ours[:, half:], theirs[1][0, :, :half])):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_equal_the_reference(scaling: str) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=POSITIONS, rope_parameters=SCALINGS[scaling]
    )
    rope = read_rope(config.to_dict())
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), COMPARED.unsqueeze(0))
    compare(cos_sin_table(rope, 64, POSITIONS, CPU)[COMPARED], theirs)


@pytest.mark.parametrize("positions", [4096, 4097])
def test_longrope_takes_the_factors_of_the_context_it_serves(positions: int) -> None:
    """Within the original length the short ones, beyond it the long ones."""
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.01 * i for i in range(32)],
        "long_factor": [1.0 + 0.9 * i for i in range(32)],
    }
    config = Phi3Config(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=POSITIONS,
        original_max_position_embeddings=4096, rope_parameters=scaling,
    )  # fmt: skip
    theirs = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(positions).unsqueeze(0))
    rope = read_rope(config.to_dict())
    compare(cos_sin_table(rope, 64, positions, CPU), theirs)
    # The keys of older files mean the same.
    old = {"model_type": "phi3", "max_position_embeddings": POSITIONS, "original_max_position_embeddings": 4096,
           "rope_theta": 10000.0, "num_hidden_layers": 1}  # fmt: skip
    del scaling["rope_type"]
    for name in ("su", "yarn", "longrope"):
        assert PHI3.fields({**old, "rope_scaling": {**scaling, "type": name}})["rope"] == rope


def test_part_of_a_head_is_rotated() -> None:
    scaling = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
    config = Phi3Config(hidden_size=256, num_attention_heads=4, rope_parameters=scaling)
    theirs = Phi3RotaryEmbedding(config)(torch.zeros(1), torch.arange(4096).unsqueeze(0))
    ours = cos_sin_table(read_rope(config.to_dict(), partial=True), 64, 4096, CPU)
    assert ours.shape == (4096, 48)
    compare(ours, theirs)


def test_longrope_with_too_few_factors_is_refused() -> None:
    rope = read_rope({"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}})
    with pytest.raises(CheckpointError, match="1 factors for 32 frequencies"):
        cos_sin_table(rope, 64, 16, CPU)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rope_scaling": {"type": "proportional", "factor": 2.0}}, "rope scaling 'proportional' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, found None"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive number, found '2'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "of their own for full_attention"),
        ({"rope_parameters": [1.0]}, "must be an object"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_rope(raw)
