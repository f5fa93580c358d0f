"""Engines whose models attend to chosen tokens (DeepSeek V3.2, GLM-5), with contexts far beyond what may be chosen,
against engines in plain PyTorch on the CPU: prompts in chunks, prefixes found again, decodes in graphs, all caches.

In the interpreter the operations over latents are the kernels, everything else is PyTorch, and a "captured" step is one
that is called again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from gpu_harness import MODE, QUICK, check, rng
from latent_cases import CONFIG, MODELS
from test_triton_latent_engine import OnHost

from penstock.engine.backends import cpu
from penstock.engine.backends.cuda import decode_graphs, prompt_graphs
from penstock.engine.backends.cuda.graphs import GraphExecutor
from penstock.engine.backends.cuda.kernels import index_choice
from penstock.engine.backends.cuda.latents import LatentOps
from penstock.engine.backends.reference import backend as reference
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.request import Request, SamplingParams
from tests.engine.harness import assert_idle, drain, generate, greedy

FAMILIES = ("v3.2", "glm-5")
PROMPTS = (2, 18) if QUICK else (1, 17, 130, 300)
SMALL: dict[str, Any] = {"index_topk": 8, "num_hidden_layers": 2} if QUICK else {}
"""Every program takes the interpreter tens of milliseconds."""


class Interpreted(LatentOps, ReferenceOps):
    pdl = False
    processors = 4


@contextlib.contextmanager
def kernels() -> Iterator[str]:
    """The device of engines that run the kernels."""
    if MODE == "device":
        yield "cuda"
        return
    from tests.engine.parallel.test_captured_steps import record

    def executor(self: Any, resources: Any) -> GraphExecutor:
        return GraphExecutor(resources)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(cpu, "load", lambda threads: None))
        stack.enter_context(patch.object(reference, "ReferenceOps", Interpreted))
        stack.enter_context(patch.object(reference.ReferenceBackend, "executor", executor))
        for module in (decode_graphs, prompt_graphs):
            stack.enter_context(patch.object(module, "record", record))
        # Every step that is captured is run, and every program takes milliseconds: nothing is captured in advance.
        stack.enter_context(patch.object(GraphExecutor, "prepare", lambda self, budget: None))
        stack.enter_context(patch.object(prompt_graphs, "TOKENS", (32,)))
        stack.enter_context(patch.object(prompt_graphs, "TOKENS_BESIDE_DECODES", (32,)))
        stack.enter_context(patch.object(index_choice, "TILE", 32))
        yield "cpu"


def load(name: str, device: str, **settings: Any) -> Engine:
    config = {**CONFIG, **MODELS[name], **SMALL}
    if QUICK and "indexer_types" in config:
        config["indexer_types"] = ["full", "shared"]
    weights = OnHost(RandomCheckpoint(config, seed=5, dtype=torch.float32, embedding_scale=1.0))
    few = {"max_running": 2, "max_model_len": 32} if QUICK else {"max_running": 8}
    chosen = EngineConfig(model="random", device=device, dtype="float32", num_blocks=100, token_budget=96, threads=1)
    return Engine.load(dataclasses.replace(chosen, **few, **settings), checkpoint=weights)


def test_engines_give_the_tokens_of_plain_torch() -> None:
    if MODE == "compile":
        return
    for name in FAMILIES:
        prompts = [[rng.randrange(199) for _ in range(n)] for n in PROMPTS]
        requests = [greedy(f"r{i}", prompt, 2 if QUICK else 24) for i, prompt in enumerate(prompts)]
        wanted = generate(load(name, "cpu"), *requests)
        with kernels() as device:
            engine = load(name, device, token_budget=12 if QUICK else 96)
            assert generate(engine, *requests) == wanted, name
            if not QUICK or name == "glm-5":
                assert generate(engine, *requests) == wanted, (name, "with the prompts found in the cache")
            executor = engine.runner.executor
            assert isinstance(executor, GraphExecutor) and executor.long_graphs is not None
            assert executor.long_graphs._captured, "long contexts decode in graphs"
            assert_idle(engine)


def test_caches_of_few_bits() -> None:
    """Log-probabilities of a long prompt, in chunks, are those of plain PyTorch with the same cache."""
    if MODE == "compile":
        return
    for name in FAMILIES[:1] if QUICK else FAMILIES:
        prompt = [rng.randrange(199) for _ in range(18 if QUICK else 300)]
        for kv_dtype in ("int8",) if QUICK else ("int8", "fp8"):  # the interpreter cuts fp8 where a device rounds
            scores = []
            for plain in (True, False):
                with contextlib.nullcontext("cpu") if plain else kernels() as device:
                    engine = load(name, device, kv_dtype=kv_dtype, token_budget=12 if QUICK else 96)
                    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
                    engine.submit(Request("a", prompt, sampling))
                    found = [one for delta in drain(engine) for one in delta.prompt_logprobs or () if one is not None]
                    scores.append(torch.tensor([one.logprob for one in found]))
            check(f"log-probabilities {name} {kv_dtype}", scores[1], scores[0], 1e-2)


def test_deterministic_mode() -> None:
    """On a device: the same bits in any batch, beside contexts of any length."""
    if MODE != "device":
        return
    for name in FAMILIES:
        requests = [greedy(f"r{n}", [rng.randrange(199) for _ in range(n)], 24) for n in (1, 17, 130, 300)]
        alone = load(name, "cuda", deterministic=True, num_blocks=400)
        expected: dict[str, list[int]] = {}
        for request in requests:
            expected |= generate(alone, request)
        for budget in (512, 64, 7):
            engine = load(name, "cuda", deterministic=True, num_blocks=400, token_budget=budget)
            assert generate(engine, *requests) == expected, (name, budget)
