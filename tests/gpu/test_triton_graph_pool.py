"""The memory that captured steps share: results of all sizes lie in it, and steps in flight read their own."""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.bench import shapes  # noqa: E402
from penstock.engine.backends.cuda.capture import GraphPool, Recording, record  # noqa: E402
from penstock.engine.backends.cuda.decode_graphs import DecodeGraphs  # noqa: E402
from penstock.engine.backends.cuda.graph_memory import graph_bytes  # noqa: E402
from penstock.engine.backends.cuda.graphs import GraphExecutor  # noqa: E402
from penstock.engine.backends.cuda.prompt_graphs import PromptGraphs  # noqa: E402
from penstock.engine.backends.interface import StepLimits  # noqa: E402
from penstock.engine.config import EngineConfig  # noqa: E402
from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.loading.random_checkpoint import RandomCheckpoint  # noqa: E402
from penstock.engine.request import Delta, Request, SamplingParams  # noqa: E402
from penstock.engine.runner.eager import EagerExecutor  # noqa: E402
from penstock.engine.sleep.offload import offload  # noqa: E402
from tests.engine.harness import assert_idle, drain  # noqa: E402
from tests.gpu.gpu_harness import Row  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
DEVICE = "cuda"
VOCABULARY = 40_000
SMALL = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
TIE = 2e-2
"""Logits spread over about one. Sums in another order move them by less than a tenth of this."""
Answers = dict[str, list[tuple[int, float | None]]]
"""Tokens and their log-probabilities."""


def test_results_of_graphs_share_memory_and_are_right_until_the_next_replay() -> None:
    if not ON_DEVICE:
        return
    device, pool = torch.device("cuda"), GraphPool()
    x = torch.zeros(1 << 22, device=device, dtype=torch.bfloat16)

    def captured(count: int, factor: int) -> Recording:
        def work() -> tuple[Tensor, Tensor]:
            rows = x[:count].view(-1, 64) * factor
            return rows[:, :60], rows.argmax(-1)  # with columns that are left out, as of a head that is cut

        return record(device, work, pool, work)

    counts = {1 << 22: 2, 3 << 20: 3, 1 << 21: 4}  # up to a million bytes would be kept elsewhere
    recordings = {count: captured(count, factor) for count, factor in counts.items()}
    logits = {count: recording.results[0] for count, recording in recordings.items()}
    assert len({one.data_ptr() for one in logits.values()}) == 1, "the memory of the largest"
    for count in (*counts, *reversed(counts)):
        x.normal_()
        recording = recordings[count]
        recording.graph.replay()
        found, best = (result.clone() for result in recording.results)
        expected = x[:count].view(-1, 64) * counts[count]
        assert found.dtype == torch.bfloat16 and found.shape == (count // 64, 60)
        assert torch.equal(found, expected[:, :60]) and torch.equal(best, expected.argmax(-1))
    # The memory is theirs as long as they are there.
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), 7.0, device=device, dtype=torch.bfloat16) for _ in range(8)]
    for recording in recordings.values():
        recording.graph.replay()
    assert all(bool((other == 7).all()) for other in others)


def load(**settings: Any) -> Engine:
    checkpoint = RandomCheckpoint(SMALL, device=DEVICE, dtype=torch.float32)
    sizes = {"max_running": 40, "num_blocks": 400, "token_budget": 256, "max_model_len": 256}
    given = {"device": DEVICE, "dtype": "float32", **sizes, **settings}
    return Engine.load(EngineConfig("random", **given), checkpoint=checkpoint)


def requests(settings: list[dict[str, Any]]) -> list[Request]:
    """Answers of all lengths, so that steps have all sizes."""
    return [
        Request(
            f"r{i}",
            [(i * 1733 + j * 577) % VOCABULARY for j in range(3 + 11 * i % 90)],
            SamplingParams(**{"max_tokens": 4 + i * 13 % 47, "temperature": 0.0, **settings[i % len(settings)]}),
        )
        for i in range(36)
    ]


DRAWN: list[dict[str, Any]] = [{}]
"""Tokens come from the graphs."""
SCORED: list[dict[str, Any]] = [{"logprobs": 0}, {"logprobs": 3}]
EDITED: list[dict[str, Any]] = [
    {"logprobs": 2, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    {"logprobs": 2, "logit_bias": {11: 3.0, 12: 3.0}},
    {"logprobs": 2, "allowed_token_ids": tuple(range(0, VOCABULARY, 3)), "bad_words": ((6, 9),)},
    {"logprobs": 2, "temperature": 0.9, "top_k": 50, "top_p": 0.9, "seed": 5},
    {"logprobs": 2},
]


def answers(engine: Engine, asked: list[Request]) -> Answers:
    """One request more with each step, so that prompts are computed beside decodes."""
    found: Answers = {request.request_id: [] for request in asked}

    def take(deltas: list[Delta]) -> None:
        for delta in deltas:
            scores = [one.logprob for one in delta.logprobs] if delta.logprobs else [None] * len(delta.tokens)
            found[delta.request_id].extend(zip(delta.tokens, scores, strict=True))

    for request in asked:
        engine.submit(request)
        output = engine.step()
        take([] if output is None else output.deltas)
    take(drain(engine))
    assert_idle(engine)
    return found


@contextmanager
def watched(engine: Engine) -> Iterator[list[tuple[str, int, int]]]:
    """Replays inside: of which kind, of which size, and how many steps were in flight before them."""
    found: list[tuple[str, int, int]] = []
    decodes, prompts = DecodeGraphs.replay, PromptGraphs.replay

    def decode(self: DecodeGraphs, batch: Any) -> tuple[Tensor, Tensor]:
        found.append(("decodes", batch.num_tokens, len(engine._in_flight)))
        return decodes(self, batch)

    def prompt(self: PromptGraphs, packed: Any, shape: Any) -> tuple[Tensor, Tensor]:
        found.append(("prompts", shape.total, len(engine._in_flight)))
        return prompts(self, packed, shape)

    with patch.object(DecodeGraphs, "replay", decode), patch.object(PromptGraphs, "replay", prompt):
        yield found


def disagreements(found: Answers, expected: Answers) -> list[tuple[str, int]]:
    """Where texts part, as they may at a tie; until there log-probabilities agree."""
    parted: list[tuple[str, int]] = []
    for name, tokens in found.items():
        assert len(tokens) == len(expected[name]), name
        for at, ((token, score), (other, wanted)) in enumerate(zip(tokens, expected[name], strict=True)):
            assert (score is None) == (wanted is None)
            if token != other:
                parted.append((name, at))
                break
            if score is not None and wanted is not None:
                assert abs(score - wanted) < TIE, (name, at, score, wanted)
    return parted


def test_steps_in_flight_give_what_launched_steps_do() -> None:
    """With log-probabilities, with rules that change logits, and as graphs draw them."""
    if not ON_DEVICE:
        return
    with patch.object(GraphExecutor, "run", EagerExecutor.run):
        launched = load()
        expected = [answers(launched, requests(kind)) for kind in (DRAWN, SCORED, EDITED)]
    del launched
    engine = load()
    executor = engine.runner.executor
    assert isinstance(executor, GraphExecutor) and executor.prompt_graphs is not None
    for stage in ("a few sizes captured", "all captured", "captured again"):
        for kind, wanted in zip((DRAWN, SCORED, EDITED), expected, strict=True):
            engine.forget_caches()
            with watched(engine) as replays:
                parted = disagreements(answers(engine, requests(kind)), wanted)
            assert len(parted) <= 3, (stage, parted)
            overlapping = [(before, now) for before, now in itertools.pairwise(replays) if now[2]]
            assert len({now[:2] for _, now in overlapping}) > 12, (stage, replays)
            assert sum(before[:2] != now[:2] for before, now in overlapping) > 12, "of another size than the one before"
            assert {name for name, _, _ in replays} == {"decodes", "prompts"}
        if stage == "a few sizes captured":
            while engine.improve():
                pass
            _assert_shared(executor)
        elif stage == "all captured":
            engine = offload(engine).restore()


def _assert_shared(executor: GraphExecutor) -> None:
    """Logits of all graphs take little more memory than the largest of them."""
    assert executor.prompt_graphs is not None
    assert set(executor.graphs._captured) == set(executor.graphs.buckets)
    captured = [*executor.graphs._captured.values(), *executor.prompt_graphs._captured.values()]
    each = [one.logits.nbytes for one in captured]
    taken, end = 0, 0
    for begin, size in sorted((one.logits.data_ptr(), one.logits.nbytes) for one in captured):
        taken += max(0, begin + size - max(begin, end))
        end = max(end, begin + size)
    print(f"    {len(each)} graphs, logits of {sum(each) >> 20} MiB in {taken >> 20}, the largest {max(each) >> 20}")
    assert len(each) > 20 and sum(each) > 12 * max(each)
    assert taken < 4 * max(each)


def _free() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def bench_memory_of_graphs() -> Iterator[Row]:
    """What all graphs of an 8B model take of the device, beside what a cache leaves them (`graph_bytes`)."""
    if not ON_DEVICE:
        return
    for what, settings in (("plain", {}), ("with adapters", {"adapter_slots": 2})):
        checkpoint = RandomCheckpoint(shapes.named("llama-8b"), device="cuda", dtype=torch.bfloat16)
        sizes: dict[str, Any] = {"max_running": 256, "max_model_len": 8192, "token_budget": 8448, "block_size": 16}
        config = EngineConfig("llama-8b", device="cuda", kv_memory=8 << 30, **sizes, **settings)
        engine = Engine.load(config, checkpoint=checkpoint)
        del checkpoint
        executor = engine.runner.executor
        assert isinstance(executor, GraphExecutor)
        again = executor.release()
        before, began = _free(), time.perf_counter()
        again()
        while engine.improve():
            pass
        torch.cuda.synchronize()
        took, taken = time.perf_counter() - began, before - _free()
        every = [graphs for graphs in (*executor._all(), executor.prompt_graphs) if graphs is not None]
        left = graph_bytes(engine.runner.decoder, StepLimits(256, 8448, 8192, 16))
        yield (
            f"{sum(len(graphs._captured) for graphs in every)} graphs of an 8B model, {what}",
            took * 1e6,
            f"{taken >> 20} MiB of {left >> 20} that are left free",
        )
        del engine, executor, again, every
        _free()
