"""Prompt steps in the padded shapes of CUDA graphs compute what the step alone computes.

Without a GPU: the work that is captured elsewhere runs as plain calls on the reference backend."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from penstock.engine.backends import cpu
from penstock.engine.backends.cuda import long_prompts
from penstock.engine.backends.cuda.capture import GraphPool
from penstock.engine.backends.cuda.packed_inputs import PackedInputs
from penstock.engine.backends.cuda.prompt_graphs import PROMPTS, WANTED, PromptGraphs, Shape, arrange
from penstock.engine.batch import Batch
from penstock.engine.core import Engine
from penstock.engine.kv.cache import KVCache
from penstock.engine.request import Request, SamplingParams
from penstock.engine.runner.eager import EagerExecutor
from penstock.engine.runner.inputs import sampling_chunks
from penstock.engine.runner.rows import Flag
from penstock.engine.runner.step import PendingStep
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint


@pytest.fixture(autouse=True)
def reference_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "load", lambda threads: None)


class PaddedExecutor(EagerExecutor):
    """Runs every step that has a shape in that shape."""

    graphs: PromptGraphs

    def __init__(self, engine: Engine) -> None:
        eager = engine.runner.executor
        assert type(eager) is EagerExecutor
        vars(self).update(vars(eager))
        rows = self._rows.flags.shape[0] - 1
        self.graphs = PromptGraphs(self._decoder, self._kv, self._rows, max_rows=rows, pool=GraphPool())
        self.shapes: list[Shape] = []

    @torch.inference_mode()
    def run(self, batch: Batch) -> PendingStep:
        shape = self.graphs.shape_of(batch)
        if shape is None:
            return super().run(batch)
        self.shapes.append(shape)
        packed = self._inputs.pack(batch)
        inputs = PackedInputs(shape.fields(states=self.graphs.stateful), self._kv.device)
        inputs.send(
            arrange(packed, shape, self.graphs.scratch_row),
            dict.fromkeys(("sample_rows", "stores"), self.graphs.scratch_row),
        )
        room = self.graphs._gathering.total_context(shape.tokens, PROMPTS)
        assert room is None or int(inputs.view("contexts", torch.int32)[shape.decodes :].sum()) <= room
        logits, tokens = self.graphs.step(inputs, shape)
        step = PendingStep(batch, self._rows, sampling_chunks(batch))
        count = len(packed.sample_at)
        if packed.flags & ~Flag.RANDOM:
            self._sample(step, logits[:count], self._inputs.sampling_of(batch, packed))
        elif step.chunks:
            (step.tokens,), step.event = self._backend.to_host(tokens[:count])
        return step


def _engine(folder: Path, **settings: object) -> Engine:
    return make_engine(folder, **{"max_running": 8, "num_blocks": 200, **settings})


def _requests(rng: random.Random) -> list[Request]:
    prompts = {f"r{n}": [rng.randrange(199) for _ in range(n)] for n in (1, 2, 17, 33, 130, 260)}
    requests = [greedy(name, prompt, 12) for name, prompt in prompts.items()]
    drawn = SamplingParams(max_tokens=12, temperature=0.8, top_k=20, seed=5, repetition_penalty=1.1)
    requests.append(replace(requests[3], request_id="drawn", params=drawn))
    return requests


def test_same_tokens_as_unpadded_steps(tmp_path: Path) -> None:
    path = write_checkpoint("llama-gqa", tmp_path)
    unpadded, engine = _engine(path, token_budget=96), _engine(path, token_budget=96)
    padded = PaddedExecutor(engine)
    engine.runner.executor = padded
    for requests in ([greedy("alone", list(range(40)), 3)], _requests(random.Random(1))):
        assert generate(engine, *requests) == generate(unpadded, *requests)
    assert_idle(engine)
    assert {shape.decodes for shape in padded.shapes} == {0, 8}, "prompts alone, and prompts beside decodes"


@pytest.mark.parametrize("family", ["llama-gqa", "qwen3-next-dense"])
def test_same_tokens_with_draft_tokens(tmp_path: Path, family: str) -> None:
    path = write_checkpoint(family, tmp_path)
    settings: dict[str, object] = {"token_budget": 96, "speculation": "ngram"}
    repeated = [3, 4, 5, 6] * 20
    requests = [greedy(f"r{i}", [*repeated, i], 16) for i in range(5)]
    plain = generate(_engine(path, **settings), *requests)
    engine = _engine(path, **settings)
    engine.runner.executor = PaddedExecutor(engine)
    assert generate(engine, *requests) == plain


STATES = ["granite4-hybrid"]
FURTHER_STATES = ["qwen3-next", "qwen3.5", "bamba", "falcon-h1", "nemotron-h", "mamba2"]


@pytest.mark.parametrize("family", [*STATES, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER_STATES)])
def test_states_are_those_of_unpadded_steps(tmp_path: Path, family: str) -> None:
    """Chunks that end where a state is kept, prompts that begin behind one, and padding, which keeps none."""
    path = write_checkpoint(family, tmp_path)
    settings: dict[str, object] = {"token_budget": 96, "state_interval": 32}
    unpadded, engine = _engine(path, **settings), _engine(path, **settings)
    padded = PaddedExecutor(engine)
    engine.runner.executor = padded
    for requests in ([greedy("alone", list(range(70)), 3)], *(_requests(random.Random(1)) for _ in range(2))):
        assert generate(engine, *requests) == generate(unpadded, *requests)
    assert engine.load_snapshot().prefix_hit_tokens == unpadded.load_snapshot().prefix_hit_tokens > 0
    assert_idle(engine)
    assert {shape.decodes for shape in padded.shapes} == {0, 8}
    for ours, theirs in zip(
        _states(padded._kv), _states(cast(EagerExecutor, unpadded.runner.executor)._kv), strict=True
    ):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-5, msg="kept by nobody, or by padding")


def _states(kv: KVCache) -> list[torch.Tensor]:
    caches = [part for layer in kv.layers for part in (layer if isinstance(layer, tuple) else (layer,))]
    return [getattr(part, name) for part in caches for name in ("conv", "state") if hasattr(part, name)]


def test_prompts_with_too_many_keys_to_gather_have_no_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "LONG_CHUNK", 40)
    path = write_checkpoint("llama-gqa", tmp_path)
    prompts = [[(at + length) % 199 for at in range(length)] for length in (130, 260)]
    monkeypatch.setattr(long_prompts, "CAPTURED_CONTEXT", 200)
    # Chunks of 96 and 34 tokens, and of 96, 96 and 68; captured with room for 200 gathered keys, all but the last.
    for gathers, shapes in ((False, 5), (True, 4)):
        engine = _engine(path, token_budget=96)
        padded = PaddedExecutor(engine)
        padded.graphs._gathering._gathers = gathers
        engine.runner.executor = padded
        for index, prompt in enumerate(prompts):
            generate(engine, greedy(f"r{index}", prompt, 1))
        assert len(padded.shapes) == shapes


def test_a_step_without_a_shape(tmp_path: Path) -> None:
    path = write_checkpoint("llama-gqa", tmp_path)
    engine = _engine(path, max_running=12)
    executor = PaddedExecutor(engine)
    engine.runner.executor = executor
    many = [greedy(f"r{i}", [i + 1, 2, 3], 2) for i in range(PROMPTS + 1)]
    generate(engine, *many)
    assert not executor.shapes, "more prompts in a step than a shape has places"


def test_some_shapes_are_captured_later_and_larger_ones_stand_in_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[Shape] = []
    engine = _engine(write_checkpoint("llama-gqa", tmp_path), max_running=64, max_model_len=128)
    graphs = PaddedExecutor(engine).graphs

    def capture(shape: Shape) -> None:
        captured.append(shape)
        graphs._later.done(shape)

    monkeypatch.setattr(graphs, "capture", capture)
    graphs.capture_all(512)
    assert {shape.decodes for shape in captured} == {0, 16, 64}
    assert {shape.tokens for shape in captured if not shape.decodes} == {64, 128}
    chunk = SimpleNamespace(seq=SimpleNamespace(prompt_logprobs=None), decodes=False)
    batch = cast(Batch, SimpleNamespace(num_tokens=40, num_decodes=20, chunks=[chunk]))
    assert graphs.shape_of(batch) == Shape(64, 128)
    for _ in range(WANTED * 3 - 1):
        found = graphs.shape_of(batch)
    assert found == Shape(32, 64), (
        "wanted so often that it is captured without waiting for a quiet moment or a long step"
    )
    while graphs.capture_next():
        pass
    assert graphs.shape_of(batch) == Shape(32, 64)
    assert len(set(captured)) == len(captured)
