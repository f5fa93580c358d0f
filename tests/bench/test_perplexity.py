"""Perplexity means what it says, and the divergence sees what perplexity hides."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from penstock.bench import perplexity
from penstock.bench.perplexity import Form, Scores
from penstock.engine.request import TokenLogprob
from penstock.errors import ConfigError
from tests.engine.harness import make_engine
from tests.engine.tiny import Reference, write_checkpoint


def test_scores_equal_the_reference_model(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    ids = [(7 * i * i + 3) % 199 for i in range(40)]
    scores = perplexity.score(make_engine(folder), [ids[:25], ids[25:]])
    reference = Reference(folder)
    expected = torch.cat(
        [reference.logprobs(piece)[range(len(piece) - 1), piece[1:]] for piece in (ids[:25], ids[25:])]
    )
    assert len(scores.positions) == 38
    assert scores.perplexity == pytest.approx(math.exp(-expected.mean().item()), rel=1e-4)


def _position(probabilities: list[float]) -> TokenLogprob:
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    return TokenLogprob(math.log(probabilities[0]), order, [math.log(probabilities[token]) for token in order])


def test_the_distance_counts_loss_difference_divergence_and_agreement() -> None:
    reference = Scores([_position([0.5, 0.25, 0.25]), _position([0.25, 0.5, 0.25])])
    far = perplexity.distance(Scores([_position([0.25, 0.5, 0.25]), _position([0.5, 0.25, 0.25])]), reference)
    assert far.loss == pytest.approx(0)  # the errors cancel in perplexity ...
    assert far.difference == pytest.approx(math.log(2))
    assert far.divergence == pytest.approx(0.25 * math.log(2))  # ... but not here
    assert far.agreement == 0
    same = perplexity.distance(reference, reference)
    assert (same.loss, same.difference, same.divergence, same.agreement) == (0, 0, 0, 1)


def test_windows_cover_the_text_once() -> None:
    assert perplexity.windows(range(10), 4) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert perplexity.windows(range(17), 8) == [list(range(8)), list(range(8, 16))]
    assert perplexity.windows([1, 2], 512) == [[1, 2]]
    assert len(perplexity.sample_text()) > 8000


def test_forms_are_named_by_weights_and_activations() -> None:
    assert Form.parse("int4") == Form("int4", "auto")
    assert str(Form.parse("int8/int16")) == "int8/int16"
    assert Form.parse("dense:fp8") == Form("dense", "auto", "fp8")
    assert str(Form.parse("int4/int8:int8")) == "int4/int8:int8"
    assert Form.parse("auto").kv_dtype == "auto" and Form.parse("int4").kv_dtype == "full"
    assert str(Form.parse("auto")) == "auto" and str(Form.parse("auto:full")) == "auto:full"
    for wrong in ("int5", "int8/int4", "dense:int4", ""):
        with pytest.raises(ConfigError, match="form"):
            Form.parse(wrong)
