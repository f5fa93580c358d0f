"""The coordinates of int8 keys: found from keys, worth having, and the same attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.bench import perplexity
from penstock.engine.backends.interface import KeyFrame
from penstock.engine.models import calibration as trial
from penstock.engine.models import rotated_keys as frames
from penstock.text import load_text
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

DIM = 32


def table(positions: int, factor: float = 1.0) -> torch.Tensor:
    """Half of a head of 32 turns, some of it fast and some hardly."""
    angles = torch.arange(positions).unsqueeze(1) * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 1e-4, 1e-5, 1e-6])
    return torch.cat((angles.cos(), angles.sin()), 1) * factor


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama")))
    return replace(engine.runner.decoder.layers[0], cos_sin=table(4096))


def some_keys(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of two heads that have much in common, some dimensions far larger than others; and what is common."""
    generator = torch.Generator().manual_seed(1)
    common = 8 * torch.randn(2, DIM, generator=generator)
    sizes = torch.randn(2, DIM, generator=generator).exp()
    still = torch.rand(len(rows), 2, DIM, generator=generator).mul(2).sub(1) * sizes + common
    return frames._turned(still, rows.unsqueeze(1)), common


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_turning_back_undoes_turning(factor: float) -> None:
    rows = table(64, factor).unsqueeze(1)
    x = torch.randn(64, 2, DIM)
    torch.testing.assert_close(frames._turned(frames._turned(x, rows), rows, back=True), x, rtol=1e-4, atol=1e-4)


def test_what_tokens_have_in_common_is_taken_away_where_turning_leaves_it(layer) -> None:  # type: ignore[no-untyped-def]
    keys, common = some_keys(layer.cos_sin[:128])
    centre, stretch = frames.key_frame(keys, layer)
    torch.testing.assert_close(centre[:, 16:], common[:, 16:], rtol=0, atol=0.6)  # these do not turn
    assert centre[:, 0].abs().max() < 0.1 * common[:, 0].abs().max(), "this one has turned all around"
    framed = (keys - centre) / stretch
    assert framed.abs().amax(-1).mean() < 0.5 * keys.abs().amax(-1).mean()
    widths = framed.abs().amax(0)
    assert (widths.amax(-1) / widths.amin(-1) < 0.5 * keys.abs().amax(0).amax(-1) / keys.abs().amax(0).amin(-1)).all()


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_a_frame_does_not_depend_on_how_long_contexts_may_get(layer, factor: float) -> None:  # type: ignore[no-untyped-def]
    keys, _ = some_keys(table(64, factor))
    whole = frames.key_frame(keys, replace(layer, cos_sin=table(4096, factor)))
    for positions in (64, 512, 2048):
        short = frames.key_frame(keys, replace(layer, cos_sin=table(positions, factor)))
        torch.testing.assert_close(short.centre, whole.centre)
        torch.testing.assert_close(short.stretch, whole.stretch)
    turns = table(2048, factor).mean(0)
    torch.testing.assert_close(frames._mean_turn(table(64, factor)), turns, rtol=1e-3, atol=1e-4)


def test_with_a_soft_cap_scores_do_not_move(layer) -> None:  # type: ignore[no-untyped-def]
    capped = replace(layer, heads=replace(layer.heads, softcap=30.0))
    keys, _ = some_keys(layer.cos_sin[:64])
    frame = frames.key_frame(keys, capped)
    assert frame.centre.abs().max() == 0 and frame.stretch.min() < 1 < frame.stretch.max()


def test_keys_that_are_all_zero_have_a_frame(layer) -> None:  # type: ignore[no-untyped-def]
    frame = frames.key_frame(torch.zeros(20, 2, DIM), layer)
    assert torch.isfinite(frame.stretch).all() and frame.stretch.min() > 0


@pytest.mark.parametrize("family", ["llama-gqa", "llama-yarn-rope", "gemma2", "qwen3-qknorm", "phi3-half-rotated"])
def test_every_family_runs_with_frames(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    wide, narrow = (make_engine(folder, kv_dtype=kv) for kv in ("auto", "int8"))
    assert all(layer.key_frame is None for layer in wide.runner.decoder.layers)
    for layer in narrow.runner.decoder.layers:
        assert layer.key_frame is not None
        assert (layer.key_frame.centre.abs().max() == 0) == (layer.heads.softcap is not None)
    assert len(generate(narrow, greedy("a", [1, 2, 3], 8))["a"]) == 8


def test_on_the_default_model_rounding_keys_costs_less_than_half(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = load_text(default_model).encode(perplexity.sample_text())[:224]

    def scores(kv_dtype: str) -> perplexity.Scores:
        settings = {"weights": "int4", "activations": "int16", "prefix_cache": False, "num_blocks": 64}
        return perplexity.score(make_engine(default_model, kv_dtype=kv_dtype, token_budget=512, **settings), [ids])

    exact, framed = scores("auto"), scores("int8")
    monkeypatch.setattr(trial, "key_frame", lambda keys, layer: KeyFrame(torch.zeros(3, 64), torch.ones(3, 64)))
    plain = scores("int8")
    assert perplexity.distance(framed, exact).divergence < 0.5 * perplexity.distance(plain, exact).divergence
