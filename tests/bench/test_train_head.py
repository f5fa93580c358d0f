"""Training a head: what it learns is what the engine computes, and the head that comes out drafts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from penstock.bench.head_model import HeadModel
from penstock.bench.library_texts import Corpus, docstrings, make_corpus, read_corpus
from penstock.bench.train_head import PASSES, Training, hidden_states, train
from penstock.engine.models.families import read_config
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import LAYER, TAPPED, PlainHead, write_speculators
from tests.engine.tiny import write_checkpoint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("target"), spread=0.3, num_hidden_layers=6)


def test_every_pass_predicts_what_a_head_drafts_there(target: Path, tmp_path: Path) -> None:
    folder = write_speculators(tmp_path / "head", norm_before_residual=False)
    tensors = load_file(folder / "model.safetensors")
    model = HeadModel(read_config(LAYER), len(tensors["lm_head.weight"]), len(TAPPED), 64)
    rest = model.load_state_dict(tensors, strict=False)
    assert not rest.missing_keys and set(rest.unexpected_keys) == {"embed_tokens.weight", "d2t", "t2d"}
    decoder = make_engine(target).runner.decoder
    text = torch.tensor([[i * 31 % 199 for i in range(24)]])
    streams, _ = hidden_states(decoder, TAPPED, text[:, :-1])
    with torch.no_grad():
        scores = model(tensors["embed_tokens.weight"][text], streams, PASSES)
    plain, tokens = PlainHead(folder, target), torch.arange(120) + tensors["d2t"]
    found = [int(tokens[logits[0, 0].argmax()]) for logits in scores]
    assert found[0] == plain.draft(text[0, :2].tolist(), 1)[0]
    # Behind the last place that all passes have: those after the first are given the text's own tokens.
    last = scores[0].shape[1] - 1
    known = text[0, : last + 2].tolist()
    for step, logits in enumerate(scores):
        assert int(tokens[logits[0, last].argmax()]) == plain.draft_given(known, text[0, last + 2 :].tolist(), step)


def test_a_trained_head_drafts(target: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 199, (count, 12)) for count in (16, 8, 8)]
    lines: list[str] = []
    options = Training(
        model=str(target), out=tmp_path / "head", device="cpu", minutes=0.2, steps=3, draft_vocab=150, new_tokens=12,
        batch=4, concurrency=8, say=lines.append,
    )  # fmt: skip
    figures = train(Corpus(*prompts), options)
    assert figures["steps"] == 3 and 0 < figures["loss"] < 100
    engine = eager_engine(target, speculation="eagle3", draft_model=str(tmp_path / "head"))
    request = greedy("a", list(range(20)), 20)
    assert generate(engine, request) == generate(make_engine(target), request)
    assert engine.load_snapshot().draft_tokens > 10


@pytest.mark.slow
def test_prompts_are_text_and_code_of_the_standard_library(tmp_path: Path) -> None:
    assert docstrings('"""' + "a word " * 40 + '"""') and not docstrings("def f(:")
    files = [tmp_path / "one.txt"]
    files[0].write_text("abc " * 500)
    corpus = make_corpus(lambda text: list(text.encode()[:5000]), files=files, prompts=20, length=32)
    assert corpus.train.shape == (20, 32) and len(corpus.text) == len(corpus.code) == 64
    corpus.write(tmp_path / "prompts.npz")
    assert (read_corpus(tmp_path / "prompts.npz").code == corpus.code).all()
