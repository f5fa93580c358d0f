"""The whole engine on CUDA: graphs, overlap, paged kernels; the same greedy tokens as the CPU reference."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.core import Engine  # noqa: E402
from penstock.engine.request import Request, SamplingParams  # noqa: E402
from tests.engine.harness import assert_idle, collect, drain, generate, greedy, make_engine  # noqa: E402
from tests.engine.quantization.layouts import LAYOUTS, write  # noqa: E402
from tests.engine.tiny import FAMILIES, Reference, write_checkpoint  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"
LENGTHS = (1, 2, 17, 130, 600)
TIE = 5e-3
"""Logits of these models spread over tens; sums in another order move them by less than this."""


def _engine(folder: Path, **settings: object) -> Engine:
    return make_engine(folder, **{"device": "cuda", "max_running": 8, "num_blocks": 200, **settings})


PARTS = 6
"""One test each: a test that takes long is taken for one that hangs."""


def test_greedy_equals_the_reference_in_families_1() -> None:
    _greedy_equals_the_reference(0)


def test_greedy_equals_the_reference_in_families_2() -> None:
    _greedy_equals_the_reference(1)


def test_greedy_equals_the_reference_in_families_3() -> None:
    _greedy_equals_the_reference(2)


def test_greedy_equals_the_reference_in_families_4() -> None:
    _greedy_equals_the_reference(3)


def test_greedy_equals_the_reference_in_families_5() -> None:
    _greedy_equals_the_reference(4)


def test_greedy_equals_the_reference_in_families_6() -> None:
    _greedy_equals_the_reference(5)


def _greedy_equals_the_reference(part: int) -> None:
    if not ON_DEVICE:
        return
    rng = random.Random(7)
    for family in list(FAMILIES)[part::PARTS]:
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(family, Path(folder))
            reference = Reference(path)
            prompts = {f"r{n}": [rng.randrange(199) for _ in range(n)] for n in LENGTHS}
            engine = _engine(path, token_budget=96, num_blocks=60)
            got = generate(engine, *(greedy(name, prompt, 40) for name, prompt in prompts.items()))
            for name, prompt in prompts.items():
                margins = reference.margins(prompt, got[name])
                if float(margins.max()) >= TIE:
                    margins = reference.margins_by_rounding(prompt, got[name])
                assert len(got[name]) == 40 and float(margins.max()) < TIE, (family, name, margins)
            again = generate(engine, *(greedy(name, prompt, 40) for name, prompt in prompts.items()))
            assert again == got and engine.load_snapshot().prefix_hit_tokens > 0
            assert_idle(engine)


def test_preemption_abort_and_stop_under_overlap() -> None:
    if not ON_DEVICE:
        return
    rng = random.Random(3)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder))
        reference = Reference(path)
        tight = _engine(path, token_budget=48, num_blocks=18, max_running=6)
        growing = {f"g{i}": [rng.randrange(199) for _ in range(5 + 20 * i)] for i in range(5)}
        got = generate(tight, *(greedy(name, prompt, 60) for name, prompt in growing.items()))
        for name, tokens in got.items():
            margins = reference.margins(growing[name], tokens)
            assert float(margins.max()) < TIE, (name, margins)
        assert tight.load_snapshot().preemptions > 0
        stop = got["g1"][7]
        tight.submit(greedy("s", growing["g1"], 60, stop_token_ids=(stop,)))
        tight.submit(greedy("gone", growing["g2"], 60))
        for _ in range(5):
            tight.step()
        tight.abort("gone")
        tokens = collect(drain(tight))["s"]
        assert got["g1"][: got["g1"].index(stop) + 1][-len(tokens) :] == tokens
        assert_idle(tight)


def test_seeds_penalties_and_logprobs_are_the_same_as_on_cpu() -> None:
    if not ON_DEVICE:
        return
    rng = random.Random(5)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("qwen3-qknorm", Path(folder))
        prompt = [rng.randrange(199) for _ in range(40)]
        settings = [
            SamplingParams(max_tokens=20, temperature=0.8, seed=3),
            SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, top_k=30, seed=4),
            SamplingParams(max_tokens=20, temperature=0.7, presence_penalty=0.5, frequency_penalty=0.2, seed=5),
            SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.3, logit_bias={7: 3.0}),
            SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, prompt_logprobs=1),
            SamplingParams(max_tokens=60, temperature=0.8, seed=6, watermark=b"k" * 32),
            SamplingParams(max_tokens=60, temperature=0.8, seed=6),
        ]
        requests = [Request(f"r{i}", prompt, params) for i, params in enumerate(settings)]
        on_cpu, on_gpu = make_engine(path), _engine(path)
        for engine in (on_cpu, on_gpu):
            for request in requests:
                engine.submit(request)
        cpu, gpu = drain(on_cpu), drain(on_gpu)
        assert collect(gpu) == collect(cpu)
        assert collect(gpu)["r5"] != collect(gpu)["r6"]
        scores = [
            [p.logprob for d in deltas if d.request_id == "r4" for p in d.logprobs or []] for deltas in (cpu, gpu)
        ]
        assert max(abs(a - b) for a, b in zip(*scores, strict=True)) < 1e-3


def test_few_bit_checkpoints_of_every_layout() -> None:
    if not ON_DEVICE:
        return
    rng = random.Random(13)
    with tempfile.TemporaryDirectory() as folder:
        dense = write_checkpoint("llama-gqa", Path(folder) / "dense", spread=0.5)
        prompts = {f"r{n}": [rng.randrange(199) for _ in range(n)] for n in (1, 9, 300)}
        for layout in LAYOUTS:
            few, same, _ = write(dense, layout, Path(folder))
            engine, reference = _engine(few), Reference(same)
            got = generate(engine, *(greedy(name, prompt, 20) for name, prompt in prompts.items()))
            for name, prompt in prompts.items():
                margins = reference.margins(prompt, got[name])
                assert float(margins.max()) < 0.05, (layout, name, margins)
            assert_idle(engine)


def test_forms_in_fewer_bits_stay_close_to_float32() -> None:
    if not ON_DEVICE:
        return
    rng = random.Random(9)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder), spread=0.3)
        prompt = [rng.randrange(199) for _ in range(300)]
        scores = {}
        for name, settings in {
            "float32": {"dtype": "float32"},
            "bf16": {"dtype": "bfloat16"},
            "fp8": {"dtype": "bfloat16", "weights": "fp8"},
            "int8": {"dtype": "bfloat16", "weights": "int8"},
            "w8a8": {"dtype": "bfloat16", "weights": "int8", "activations": "int8"},
            "int4": {"dtype": "bfloat16", "weights": "int4"},
        }.items():
            engine = _engine(path, **settings)
            engine.submit(Request("a", prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
            first = drain(engine)[0]
            assert first.prompt_logprobs is not None
            scores[name] = torch.tensor([p.logprob for p in first.prompt_logprobs[1:] if p is not None])
        for name, limit in (("bf16", 0.05), ("fp8", 0.2), ("int8", 0.06), ("w8a8", 0.15), ("int4", 0.6)):
            difference = float((scores[name] - scores["float32"]).abs().mean())
            print(f"    mean difference of log-probabilities, {name}: {difference:.4f}")
            assert difference < limit


def test_a_cache_in_few_bits_stays_close_at_long_context() -> None:
    """33,000 tokens: errors of the cache must not add up along the context."""
    if not ON_DEVICE:
        return
    rng = random.Random(11)
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder), spread=0.3)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40960}))
        prompt = [rng.randrange(199) for _ in range(33_000)]
        scores, blocks = {}, {}
        for kv_dtype in ("auto", "fp8", "int8"):
            engine = make_engine(
                path, device="cuda", dtype="bfloat16", kv_dtype=kv_dtype, max_running=64, kv_memory=64 << 20
            )
            blocks[kv_dtype] = engine.info.num_blocks
            engine.submit(Request("a", prompt, SamplingParams(max_tokens=8, temperature=0.0, prompt_logprobs=0)))
            first = drain(engine)[0]
            assert first.prompt_logprobs is not None
            scores[kv_dtype] = torch.tensor([p.logprob for p in first.prompt_logprobs[1:] if p is not None])
        # Heads of 16 numbers: in int8 their scale costs an eighth.
        for kv_dtype, gain in (("fp8", 1.9), ("int8", 1.7)):
            difference = (scores["auto"] - scores[kv_dtype]).abs()
            early, late = float(difference[:1000].mean()), float(difference[-1000:].mean())
            print(f"    {kv_dtype} cache, mean log-probability difference: first 1000 {early:.4f}, last {late:.4f}")
            assert blocks[kv_dtype] > gain * blocks["auto"], blocks
            assert late < 0.05 and late < 3 * early + 0.01


def test_fp8_checkpoints_run_as_stored() -> None:
    if not ON_DEVICE:
        return
    from tests.engine.loading.test_fp8_checkpoint import to_fp8

    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint("llama-gqa", Path(folder), spread=0.3)
        to_fp8(path, "row")
        prompt = list(range(150))
        scores = []
        for settings in ({"dtype": "bfloat16"}, {"dtype": "float32", "weights": "dense"}):
            engine = _engine(path, **settings)
            engine.submit(Request("a", prompt, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)))
            first = drain(engine)[0]
            assert first.prompt_logprobs is not None
            scores.append(torch.tensor([p.logprob for p in first.prompt_logprobs[1:] if p is not None]))
            stored = engine.runner.decoder.layers[0].mixer.qkv.weight_bytes
            assert stored == (1 if settings["dtype"] == "bfloat16" else 4) * 64 * 128
        assert float((scores[0] - scores[1]).abs().mean()) < 0.15
