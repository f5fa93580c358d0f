"""Token masks on the device: allowed logits stay as they are, the others become -inf, other rows are not touched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from gpu_harness import DEVICE, MODE, QUICK, Row, bandwidth, check_equal, integers, rand, rng, time_us
from torch import Tensor

from penstock.engine.backends.cuda.ops import TritonOps
from penstock.engine.backends.reference.masks import mask_logits
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.grammar.interface import Interruptible, TokenMatcher
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.request import Request, SamplingParams, Thought

ops = TritonOps(DEVICE)
VOCABS = [5, 3000] if QUICK else [5, 3000, 49152, 128256, rng.randrange(2, 200000)]


def random_bits(rows: int, vocab: int) -> Tensor:
    words = -(-vocab // 32)
    values = [rng.getrandbits(32) - 2**31 for _ in range(rows * words)]
    return integers(values, torch.int32).view(rows, words)


def test_masks_follow_their_definition() -> None:
    for vocab in VOCABS:
        for dtype in (torch.float32, torch.bfloat16):
            rows = 6
            logits = rand(rows, vocab, dtype=dtype)
            want = logits.cpu().clone()
            at = integers([4, 0, 3], torch.int64)
            bits = random_bits(3, vocab)
            bits[1] = -1
            ops.mask_logits(logits, at, bits)
            if MODE == "compile":
                continue
            mask_logits(want, at.cpu(), bits.cpu())
            check_equal(f"mask {vocab} {dtype}", logits, want)


class Cycle:
    """Allows every seventh token, others at every position; complete after `left` tokens."""

    error: str | None = None
    memory = 0

    def __init__(self, left: int) -> None:
        self.left, self.at = left, 0

    def fail(self, problem: str) -> None:
        self.error = problem

    @property
    def complete(self) -> bool:
        return self.left == 0

    def accept(self, token: int) -> None:
        assert token % 7 == self.at * 3 % 7, f"token {token} at {self.at}"
        self.at += 1
        self.left -= 1


class CycleCompiler:
    """Grammars without a library: their source is their length."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def compile(self, grammar: str, interruptible: Interruptible | None = None) -> Cycle:
        return Cycle(int(grammar))

    def close(self) -> None:
        """Nothing is open."""

    def copy(self, matcher: TokenMatcher) -> Cycle:
        assert isinstance(matcher, Cycle)
        return Cycle(matcher.left)

    def fill(self, matchers: Sequence[TokenMatcher], masks: np.ndarray) -> None:
        for matcher, mask in zip(matchers, masks, strict=True):
            assert isinstance(matcher, Cycle)
            allowed = np.arange(32 * len(mask)) % 7 == matcher.at * 3 % 7
            mask[:] = np.packbits(allowed, bitorder="little").view(np.int32)


MODEL = {
    "model_type": "llama",
    "vocab_size": 3001,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def test_grammars_in_a_whole_engine_beside_others_that_overlap() -> None:
    if MODE == "compile":
        return
    config = EngineConfig(
        model="random", device=DEVICE.type, dtype="float32", max_running=8, num_blocks=200, max_model_len=256
    )
    engine = Engine.load(
        config,
        checkpoint=RandomCheckpoint(MODEL, device=DEVICE, dtype=torch.float32),
        grammars=CycleCompiler,
    )
    prompts = [[rng.randrange(3001) for _ in range(5 + 30 * i)] for i in range(6)]
    free = [
        Request(f"free{i}", prompts[i], SamplingParams(max_tokens=24, temperature=i * 0.5, seed=i)) for i in range(3)
    ]
    bound = [
        Request(
            f"bound{i}",
            prompts[i + 3],
            SamplingParams(max_tokens=60, temperature=i * 0.6, top_p=1 - 0.1 * i, seed=i, grammar=str(9 + 6 * i)),
        )
        for i in range(3)
    ]
    alone = _run(engine, free)
    mixed = _run(engine, free + bound)
    assert {name: mixed[name] for name in alone} == alone
    for i in range(3):
        tokens, reason = mixed[f"bound{i}"]
        assert reason == "complete" and len(tokens) == 9 + 6 * i
        assert [token % 7 for token in tokens] == [at * 3 % 7 for at in range(len(tokens))]


def test_thoughts_with_a_budget_beside_others_that_overlap() -> None:
    """The step runs ahead until a thought has to be closed; what follows is what a prompt with these tokens gives."""
    if MODE == "compile":
        return
    config = EngineConfig(
        model="random", device=DEVICE.type, dtype="float32", max_running=8, num_blocks=200, max_model_len=256
    )
    engine = Engine.load(
        config,
        checkpoint=RandomCheckpoint(MODEL, device=DEVICE, dtype=torch.float32),
        grammars=CycleCompiler,
    )
    prompts = [[rng.randrange(3001) for _ in range(5 + 30 * i)] for i in range(4)]
    free = [Request(f"free{i}", prompts[i], SamplingParams(max_tokens=24, temperature=i * 0.5, seed=i)) for i in (0, 1)]
    close = (2999, 3000, 2998)
    thoughts = [
        Request(
            f"thought{i}",
            prompts[i],
            SamplingParams(
                max_tokens=24,
                temperature=i * 0.5,
                seed=i,
                grammar="9" if i > 1 else "",
                thought=Thought(end=((3000,),), close=close, budget=7),
            ),
        )
        for i in range(4)
    ]
    alone = _run(engine, free)
    mixed = _run(engine, free + thoughts)
    assert {name: mixed[name] for name in alone} == alone
    for i in range(4):
        tokens, reason = mixed[f"thought{i}"]
        assert tuple(tokens[7:10]) == close, tokens
        if i < 2:
            assert tokens[:7] == alone[f"free{i}"][0][:7] and len(tokens) == 24 and reason == "length"
        else:
            assert reason == "complete" and [token % 7 for token in tokens[10:]] == [at * 3 % 7 for at in range(9)]
    more = Request("more", prompts[0] + mixed["thought0"][0][:10], SamplingParams(max_tokens=14, temperature=0.0))
    assert _run(engine, [more])["more"][0] == mixed["thought0"][0][10:]


def _run(engine: Engine, requests: list[Request]) -> dict[str, tuple[list[int], str | None]]:
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    reasons: dict[str, str | None] = {}
    while engine.has_work:
        output = engine.step()
        for delta in output.deltas if output is not None else ():
            tokens[delta.request_id] += delta.tokens
            reasons[delta.request_id] = delta.finish_reason
    return {name: (found, reasons[name]) for name, found in tokens.items()}


def bench_masks() -> Iterator[Row]:
    vocab = 128256
    for count in (1, 16, 64):
        sets = [rand(count, vocab) for _ in range(4)]
        at = torch.arange(count, device=DEVICE)
        bits = torch.zeros(count, -(-vocab // 32), dtype=torch.int32, device=DEVICE)
        us = time_us([lambda x=x, a=at, b=bits: ops.mask_logits(x, a, b) for x in sets])
        yield bandwidth(f"mask_logits {count}x{vocab}", us, count * vocab * 4)
