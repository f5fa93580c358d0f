"""Speculation on CUDA: verification in the decode graphs, drafts from a second model's graphs; the text stays."""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.bench.speculation import Scenario, decisive, measure  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.request import Request, SamplingParams  # noqa: E402
from tests.engine.harness import assert_idle, generate, greedy, make_engine  # noqa: E402
from tests.engine.speculative.forced import Oracle, eager_engine  # noqa: E402
from tests.engine.speculative.heads import PlainHead, noted_drafts, write_head  # noqa: E402
from tests.engine.speculative.mtp_layers import PlainMtp, write_mtp  # noqa: E402
from tests.engine.speculative.plain_mtp import PLAIN  # noqa: E402
from tests.engine.tiny import write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
CUDA = {"device": "cuda", "max_running": 8, "num_blocks": 200}


def requests(seed: int) -> list[Request]:
    rng = random.Random(seed)
    settings = [
        {"temperature": 0.0},
        {"temperature": 0.9},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 30},
        {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.4, "logit_bias": {3: 4.0}},
        {"temperature": 0.0, "logprobs": 2},
    ]
    return [
        Request(
            f"r{index}",
            [rng.randrange(199) for _ in range(rng.randrange(3, 120))],
            SamplingParams(max_tokens=50, seed=index, **params),  # type: ignore[arg-type]
        )
        for index, params in enumerate(settings)
    ]


def test_right_and_wrong_drafts_give_the_text_of_the_plain_engine() -> None:
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder))
        plain = make_engine(path, **CUDA)
        texts = generate(plain, *requests(1))
        for wrong, blocks in ((0.0, 200), (0.3, 200), (0.3, 16)):
            engine = eager_engine(
                path, lambda _, w=wrong: Oracle(texts, wrong=w, vocab_size=199), **{**CUDA, "num_blocks": blocks}
            )
            assert generate(engine, *requests(1)) == texts, (wrong, blocks)
            load = engine.load_snapshot()
            assert load.accepted_tokens > 40
            if blocks == 200:  # a pool that small preempts, which takes steps of its own
                assert engine.steps < plain.steps, (wrong, engine.steps, plain.steps)
            assert_idle(engine)


def test_a_draft_model_that_is_the_target_is_always_right() -> None:
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder))
        plain = make_engine(path, **CUDA)
        few = requests(2)[:3]
        texts = generate(plain, *few)
        engine = eager_engine(path, speculation="draft", draft_model=str(path), **CUDA)
        assert generate(engine, *few) == texts
        load = engine.load_snapshot()
        # Draft and target run in batches of different sizes, so a tie may fall either way now and then.
        assert load.accepted_tokens > 0.97 * load.draft_tokens > 0, load
        assert_idle(engine)


def test_a_recurrent_draft_goes_on_from_the_state_behind_the_last_accepted_token() -> None:
    """It drafts for itself, so it is right but for ties; behind tokens that a penalty rejects too."""
    if not ON_DEVICE:
        return
    for model in ("qwen3-next-dense", "mamba2", "lfm2"):
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(model, Path(folder))
            plain = make_engine(path, **CUDA)
            few = requests(2)[:3]
            engine = eager_engine(path, speculation="draft", draft_model=str(path), **CUDA)
            assert generate(engine, *few) == generate(plain, *few), model
            load = engine.load_snapshot()
            assert load.accepted_tokens > 0.97 * load.draft_tokens > 0, (model, load)
            again = [replace(request, request_id=f"{request.request_id} again") for request in requests(3)]
            assert generate(engine, *again) == generate(plain, *again), model
            assert_idle(engine)


def test_an_eagle3_head_drafts_as_on_the_cpu() -> None:
    """Its steps replay from graphs, prompts are read in chunks and prefixes shared; what it drafts is what the head
    drafts on the CPU, and the text is the plain engine's."""
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder) / "target", spread=0.3, num_hidden_layers=4)
        plain = make_engine(path, **CUDA)
        for layout in ("original", "speculators"):
            head = write_head(layout, Path(folder) / layout)
            settings = {"speculation": "eagle3", "draft_model": str(head), "token_budget": 64}
            engine, on_cpu = eager_engine(path, **CUDA, **settings), eager_engine(path, **settings)
            for few in (requests(4), requests(4)[:2]):  # the second time from the prefix cache
                assert generate(engine, *few) == generate(plain, *few)
            generate(on_cpu, *requests(4))
            generate(on_cpu, *requests(4)[:2])
            ours, theirs = engine.load_snapshot(), on_cpu.load_snapshot()
            assert ours.draft_tokens > 200
            # Sums round differently now and then, and a draft token differs.
            assert abs(ours.accepted_tokens - theirs.accepted_tokens) <= 0.1 * ours.draft_tokens, (ours, theirs)
            assert_idle(engine)


def test_an_eagle3_head_drafts_what_plain_pytorch_does() -> None:
    """Drafts noted on the device are those of a plain implementation in PyTorch."""
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder) / "target", spread=0.3, num_hidden_layers=4)
        head = write_head("original", Path(folder) / "head")
        engine = eager_engine(path, speculation="eagle3", draft_model=str(head), **CUDA)
        drafts = noted_drafts(engine)
        generate(engine, greedy("a", [i * 7 % 199 for i in range(100)], 30), greedy("b", [5, 4], 30))
        reference = PlainHead(head, path)
        right = [draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts]
        assert len(right) > 20 and sum(right) >= 0.95 * len(right), right


def test_mtp_layers_draft_what_the_reference_does() -> None:
    if not ON_DEVICE:
        return
    for family in ("glm4-moe", "deepseek-v3", "qwen3-next"):
        with tempfile.TemporaryDirectory() as folder:
            path = write_mtp(family, Path(folder))
            plain = make_engine(path, **CUDA)
            engine = eager_engine(path, speculation="mtp", speculation_depth=3, **CUDA)
            drafts = noted_drafts(engine)
            few = [greedy("a", [i * 7 % 199 for i in range(70)], 20), greedy("b", [5, 4], 20)]
            assert generate(engine, *few) == generate(plain, *few), family
            reference = PlainMtp(path)
            right = [draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts]
            assert len(right) > 10 and sum(right) >= 0.9 * len(right), (family, right)


def test_mtp_layers_that_no_library_has_do_too() -> None:
    if not ON_DEVICE:
        return
    for family, plain_layer in PLAIN.items():
        with tempfile.TemporaryDirectory() as folder:
            path = plain_layer.write(family, Path(folder))
            engine = eager_engine(path, speculation="mtp", speculation_depth=3, **CUDA)
            drafts = noted_drafts(engine)
            few = [greedy("a", [i * 7 % 199 for i in range(70)], 20), greedy("b", [5, 4], 20)]
            assert generate(engine, *few) == generate(make_engine(path, **CUDA), *few), family
            layer = plain_layer(path)
            right = [layer.scores(tokens, draft).argmax(-1).tolist() == draft for tokens, draft in drafts]
            assert len(right) > 10 and sum(right) >= 0.9 * len(right), (family, right)


def test_a_tight_engine_verifies_beyond_its_rows() -> None:
    """One sequence, six drafts: graphs must exist for more tokens than rows."""
    if not ON_DEVICE:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder))
        request = greedy("a", list(range(100)), 60)
        texts = generate(make_engine(path, **CUDA), request)
        engine = eager_engine(path, lambda _: Oracle(texts, wrong=0.0, vocab_size=199), **{**CUDA, "max_running": 1})
        assert generate(engine, request) == texts and engine.steps < 40


def bench_speculation() -> Iterator[tuple[str, float, str]]:
    """An 8B shape: plain and speculating turns at a given acceptance."""
    if not ON_DEVICE:
        return
    engine = Engine.load(
        EngineConfig(
            model="llama-8b", device="cuda", max_running=64, max_model_len=2048, speculation="ngram", num_blocks=4096
        ),
        checkpoint=decisive("llama-8b", torch.device("cuda"), torch.bfloat16),
    )
    rng = random.Random(0)
    for batch in (1, 4, 8, 16, 64):
        prompts = [[rng.randrange(1000, 100_000) for _ in range(128)] for _ in range(batch)]
        for acceptance in (0.9, 0.6, 0.0):
            plain, speculated = measure(
                engine,
                Scenario(f"b{batch}", prompts, exact=False),
                rounds=1,
                output_len=128,
                temperature=0.0,
                acceptance=acceptance,
            )
            ratio = speculated[0].rate / plain[0].rate
            us = 1e6 / speculated[0].rate
            per_step = speculated[0].counted / speculated[0].steps / batch
            same = statistics.mean(speculated[0].tokens[name] == text for name, text in plain[0].tokens.items())
            yield (
                f"batch {batch}, acceptance {acceptance:.0%}",
                us,
                f"{speculated[0].rate:,.0f} tok/s, ratio {ratio:.2f}, {per_step:.2f} tokens/step, {same:.0%} same text",
            )
