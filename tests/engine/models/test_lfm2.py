"""LFM2: the convolution natively and in PyTorch, recorded steps, configurations as they are published, routing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.backends.cpu.executor import RecordedExecutor
from penstock.engine.backends.interface import AttentionBatch, ShortConvWeights, StateBatch
from penstock.engine.backends.reference.short_conv import short_conv
from penstock.engine.models.families import read_config
from penstock.engine.models.layers.experts import Router
from penstock.errors import CheckpointError
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint

CHANNELS, WIDTH = 37, 4
"""No multiple of a vector."""


def batch(starts: list[int], lengths: list[int], reads: list[int], writes: list[list[int]]) -> AttentionBatch:
    """Runs of tokens; `writes`: the slots of the last tokens of each."""
    first, read, kept, positions = [], [], [], []
    for start, length, slot, slots in zip(starts, lengths, reads, writes, strict=True):
        first += [len(first)] * length
        read += [slot] * length
        kept += [0] * (length - len(slots)) + slots
        positions += range(start, start + length)
    states = (torch.tensor(one, dtype=torch.int32) for one in (first, first, read, kept))
    none = torch.zeros(0, dtype=torch.int32)
    return AttentionBatch(
        positions=torch.tensor(positions), slots=torch.zeros(len(first), dtype=torch.int64), query_starts=none,
        context_lens=none, rows=none, block_tables=none, num_decodes=0, max_query=1, max_context=1,
        states=StateBatch(*states),
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_engine(write_checkpoint("lfm2", tmp_path_factory.mktemp("lfm2")), threads=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_native_convolution_is_that_of_pytorch(engine: Any, dtype: torch.dtype) -> None:
    """Prompts, a chunk behind one, decodes, draft tokens that all leave a state, a state that is overwritten."""
    torch.manual_seed(5)
    weights = ShortConvWeights(torch.randn(WIDTH, CHANNELS), torch.randn(CHANNELS))
    ops, bits = engine.runner.decoder.ops, dtype.itemsize
    caches = [torch.zeros(9, WIDTH, CHANNELS, dtype=dtype) for _ in range(2)]
    steps = [
        batch([0, 0], [1, 6], [0, 0], [[1], [2]]),
        batch([1, 6, 0], [1, 3, 2], [1, 2, 0], [[1], [3], [4]]),
        batch([2, 9, 2], [4, 1, 1], [1, 3, 4], [[5, 6, 7, 8], [3], []]),
        batch([4, 10], [2, 1], [6, 3], [[6], [2]]),  # two draft tokens were rejected
    ]
    for step in steps:
        x = torch.randn(len(step.positions), 3 * CHANNELS).to(dtype)
        wanted, got = short_conv(x, weights, step, caches[0]), ops.short_conv(x, weights, step, caches[1])
        torch.testing.assert_close(got, wanted, rtol=2 ** (-7 if bits == 2 else -18), atol=1e-5)


def test_cut_anywhere_a_run_gives_the_same_bits(engine: Any) -> None:
    torch.manual_seed(6)
    weights = ShortConvWeights(torch.randn(WIDTH, CHANNELS), torch.randn(CHANNELS))
    x, ops = torch.randn(9, 3 * CHANNELS).to(torch.bfloat16), engine.runner.decoder.ops

    def run(*lengths: int) -> torch.Tensor:
        cache, found, start = torch.zeros(2, WIDTH, CHANNELS, dtype=x.dtype), [], 0
        for length in lengths:
            step = batch([start], [length], [1 if start else 0], [[1]])
            found.append(ops.short_conv(x[start : start + length].contiguous(), weights, step, cache))
            start += length
        return torch.cat(found)

    assert torch.equal(run(9), run(1, 4, 1, 1, 2))
    assert torch.equal(run(9), run(*[1] * 9))


def test_steps_are_recorded(tmp_path: Path) -> None:
    """Where its linears are: dense ones in float32 are oneDNN's."""
    executor = make_engine(write_checkpoint("lfm2", tmp_path), weights="int8").runner.executor
    assert isinstance(executor, RecordedExecutor) and executor.recorded is not None
    assert "pk_short_conv" in executor.recorded.names


def published(**changes: Any) -> dict[str, Any]:
    """Keys as the first releases have them."""
    return {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
        "max_position_embeddings": 128000, "norm_eps": 1e-5, "num_attention_heads": 32, "num_heads": 32,
        "num_hidden_layers": 16, "num_key_value_heads": 8, "rope_theta": 1000000.0, "use_pos_enc": True,
        "vocab_size": 65536, **changes,
    }  # fmt: skip


def test_a_published_configuration() -> None:
    config = read_config(published())
    assert config.ffn_size == 8192 and config.tied_embeddings and config.head_dim == 64 and config.rms_eps == 1e-5
    assert config.short_conv is not None and config.short_conv.width == 3 and config.short_conv.channels == 2048
    assert [index for index, own in enumerate(config.short_conv.layers) if not own] == [2, 5, 8, 10, 12, 14]
    assert config.rope.theta == 1000000.0
    assert not read_config(published(tie_embedding=False)).tied_embeddings
    assert read_config(published(block_auto_adjust_ff_dim=False)).ffn_size == 12288
    assert read_config(published(block_ffn_dim_multiplier=1.3)).ffn_size == 10752
    assert read_config(published(full_attn_idxs=None)).short_conv is None


def test_what_cannot_be_run_is_refused() -> None:
    with pytest.raises(CheckpointError, match="layer_types must name one of conv, full_attention for each of 16"):
        read_config(published(layer_types=["conv"] * 15 + ["mamba"]))
    with pytest.raises(CheckpointError, match="layer_types must name one of"):
        read_config({**published(), "model_type": "lfm2_moe", "layer_types": None})


def test_small_scores_are_divided_by_more_than_their_sum() -> None:
    """The reference adds a millionth, which shows where all scores are small."""
    linear: Any = lambda x: x  # noqa: E731
    logits = torch.tensor([[-14.0, -15.0, -30.0]])
    router = Router(linear, 2, True, scoring="sigmoid", total_eps=1e-6)
    weights, _ = router(logits)
    scores = logits[:, :2].sigmoid()
    torch.testing.assert_close(weights, scores / (scores.sum(-1, keepdim=True) + 1e-6))
    assert float(weights.sum()) < 0.6
