"""Smoothing of int8 keys: computed from keys, worth its cost, and the same attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.bench import perplexity
from penstock.engine.backends.interface import KeySmoothing
from penstock.engine.models import calibration
from penstock.engine.models import key_smoothing as smoothing
from penstock.text import load_text
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint

DIM = 32


def table(positions: int, factor: float = 1.0) -> torch.Tensor:
    """Half of a head of 32 is rotated, some of it fast and some hardly."""
    angles = torch.arange(positions).unsqueeze(1) * torch.tensor([1.0, 0.3, 0.1, 0.03, 0.01, 1e-4, 1e-5, 1e-6])
    return torch.cat((angles.cos(), angles.sin()), 1) * factor


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path_factory.mktemp("llama")))
    return replace(engine.runner.decoder.layers[0].mixer, cos_sin=table(4096))


def some_keys(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys of two heads that have much in common, some dimensions far larger than others; and what is common."""
    generator = torch.Generator().manual_seed(1)
    common = 8 * torch.randn(2, DIM, generator=generator)
    sizes = torch.randn(2, DIM, generator=generator).exp()
    still = torch.rand(len(rows), 2, DIM, generator=generator).mul(2).sub(1) * sizes + common
    return smoothing._rotate(still, rows.unsqueeze(1)), common


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_the_inverse_undoes_the_rotation(factor: float) -> None:
    rows = table(64, factor).unsqueeze(1)
    x = torch.randn(64, 2, DIM)
    torch.testing.assert_close(
        smoothing._rotate(smoothing._rotate(x, rows), rows, inverse=True), x, rtol=1e-4, atol=1e-4
    )


def test_the_mean_key_is_subtracted_where_rope_leaves_it(attention) -> None:  # type: ignore[no-untyped-def]
    keys, common = some_keys(attention.cos_sin[:128])
    centre, scale = smoothing.key_smoothing(keys, attention)
    torch.testing.assert_close(centre[:, 16:], common[:, 16:], rtol=0, atol=0.6)  # not rotated
    assert centre[:, 0].abs().max() < 0.1 * common[:, 0].abs().max(), "rotated all around"
    smoothed = (keys - centre) / scale
    assert smoothed.abs().amax(-1).mean() < 0.5 * keys.abs().amax(-1).mean()
    widths = smoothed.abs().amax(0)
    assert (widths.amax(-1) / widths.amin(-1) < 0.5 * keys.abs().amax(0).amax(-1) / keys.abs().amax(0).amin(-1)).all()


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_smoothing_does_not_depend_on_how_long_contexts_may_get(attention, factor: float) -> None:  # type: ignore[no-untyped-def]
    keys, _ = some_keys(table(64, factor))
    whole = smoothing.key_smoothing(keys, replace(attention, cos_sin=table(4096, factor)))
    for positions in (64, 512, 2048):
        short = smoothing.key_smoothing(keys, replace(attention, cos_sin=table(positions, factor)))
        torch.testing.assert_close(short.centre, whole.centre)
        torch.testing.assert_close(short.scale, whole.scale)
    known = smoothing.key_smoothing(
        keys, replace(attention, cos_sin=table(512, factor)), smoothing.mean_rotation(table(64, factor))
    )
    torch.testing.assert_close(known.centre, whole.centre)
    mean = table(2048, factor).mean(0)
    torch.testing.assert_close(smoothing.mean_rotation(table(64, factor)), mean, rtol=1e-3, atol=1e-4)


def test_with_a_soft_cap_scores_do_not_move(attention) -> None:  # type: ignore[no-untyped-def]
    capped = replace(attention, heads=replace(attention.heads, softcap=30.0))
    keys, _ = some_keys(attention.cos_sin[:64])
    found = smoothing.key_smoothing(keys, capped)
    assert found.centre.abs().max() == 0 and found.scale.min() < 1 < found.scale.max()


def test_keys_that_are_all_zero_can_be_smoothed(attention) -> None:  # type: ignore[no-untyped-def]
    found = smoothing.key_smoothing(torch.zeros(20, 2, DIM), attention)
    assert torch.isfinite(found.scale).all() and found.scale.min() > 0


@pytest.mark.parametrize("family", ["llama-gqa", "llama-yarn-rope", "gemma2", "qwen3-qknorm", "phi3-half-rotated"])
def test_every_family_runs_with_smoothed_keys(family: str, tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path)
    wide, narrow = (make_engine(folder, kv_dtype=kv) for kv in ("auto", "int8"))
    assert all(layer.mixer.key_smoothing is None for layer in wide.runner.decoder.layers)
    for layer in narrow.runner.decoder.layers:
        assert layer.mixer.key_smoothing is not None
        assert (layer.mixer.key_smoothing.centre.abs().max() == 0) == (layer.mixer.heads.softcap is not None)
    assert len(generate(narrow, greedy("a", [1, 2, 3], 8))["a"]) == 8


@pytest.mark.slow
def test_on_the_default_model_rounding_keys_costs_less_than_half(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = load_text(default_model).encode(perplexity.sample_text())[:224]

    def scores(kv_dtype: str) -> perplexity.Scores:
        settings = {"weights": "int4", "activations": "int16", "prefix_cache": False, "num_blocks": 64}
        return perplexity.score(make_engine(default_model, kv_dtype=kv_dtype, token_budget=512, **settings), [ids])

    exact, smoothed = scores("auto"), scores("int8")
    monkeypatch.setattr(
        calibration, "key_smoothing", lambda keys, attention: KeySmoothing(torch.zeros(3, 64), torch.ones(3, 64))
    )
    plain = scores("int8")
    assert perplexity.distance(smoothed, exact).divergence < 0.5 * perplexity.distance(plain, exact).divergence
