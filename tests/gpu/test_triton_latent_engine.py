"""Models with attention over latents: engines against those of the CPU, fused steps, FP8 in tiles, determinism."""

from __future__ import annotations

import dataclasses

import torch
from gpu_harness import DEVICE, MODE, QUICK, check, integers, rng
from latent_cases import BF16, BLOCK, CONFIG, MODELS, OnTriton, make_batch
from torch import Tensor

from penstock.engine.backends.cuda.block_fp8_linear import BlockFp8Linear
from penstock.engine.backends.interface import FP8
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.kv.cache import KVCache
from penstock.engine.loading.fp8 import Fp8Checkpoint
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.models.build import build_decoder
from penstock.engine.models.families import is_linear, read_config
from penstock.engine.request import Request, SamplingParams
from tests.engine.harness import drain, generate, greedy


class OnHost:
    """A checkpoint whose numbers are the same on every device: each has a generator of its own."""

    def __init__(self, random: RandomCheckpoint) -> None:
        self.random, self.config, self.names = random, random.config, random.names

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        return self.random.tensor(name, "cpu").to(device)


def test_engines_give_the_tokens_of_the_reference() -> None:
    """Prompts in chunks, prefixes found again, decodes in graphs, in float32; tokens are those of the CPU."""
    if MODE != "device":
        return
    for name, changes in MODELS.items():
        weights = OnHost(RandomCheckpoint({**CONFIG, **changes}, seed=5, dtype=torch.float32, embedding_scale=1.0))
        wanted = [[rng.randrange(199) for _ in range(n)] for n in (1, 17, 130, 300)]
        found = []
        for device in ("cpu", "cuda"):
            settings = EngineConfig(
                model="random", device=device, dtype="float32", max_running=8, num_blocks=100, token_budget=96
            )
            engine = Engine.load(settings, checkpoint=weights)
            requests = [greedy(f"r{i}", prompt, 24) for i, prompt in enumerate(wanted)]
            found.append(generate(engine, *requests))
            assert generate(engine, *requests) == found[-1], (name, device)
            # Alone, steps of one token fold norms and sums into their products.
            alone = {key: tokens for one in requests for key, tokens in generate(engine, one).items()}
            assert alone == found[-1], (name, device)
        assert found[0] == found[1], name


def test_a_step_of_one_token_in_fused_launches() -> None:
    """Norms, residual additions, routing and the shared expert inside of products; the same numbers as apart."""
    if MODE == "compile":
        return
    qwen = {
        "model_type": "qwen3_moe", "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "max_position_embeddings": 64,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    }  # fmt: skip
    configs = [{**CONFIG, **MODELS["v2 lite"], "num_hidden_layers": 2}, qwen]
    configs += [] if QUICK else [{**CONFIG, **MODELS["v3"]}]
    for config in configs:
        weights = OnHost(RandomCheckpoint(config, seed=5, dtype=torch.float32, embedding_scale=1.0))
        decoder = build_decoder(
            weights, read_config(weights.config), OnTriton(), dtype=torch.float32, max_positions=64, fused_up_to=8
        )
        assert decoder.fused_up_to == 1
        apart = dataclasses.replace(decoder, fused_up_to=0)
        batch, blocks = make_batch([20], [])
        found = []
        for one in (decoder, apart):
            kv = KVCache(one.cache_shape(BLOCK, torch.float32), blocks, DEVICE)
            for index, layer in enumerate(kv.layers):
                filled = torch.Generator(device=DEVICE).manual_seed(index)
                for part in ("latents", "k", "v"):
                    if hasattr(layer, part):
                        getattr(layer, part).normal_(generator=filled)
            found.append(one.forward(integers([7], torch.int64), batch, kv))
        check(config["model_type"], found[0], found[1].double(), 1e-4)


class InTiles:
    """A checkpoint whose matrices are FP8 in tiles of 128 x 128, as DeepSeek V3 is published; or, `widened`, the same
    numbers in its own type. Scales are powers of two, so that they are the same."""

    def __init__(self, dense: RandomCheckpoint, *, widened: bool = False) -> None:
        self.dense, self.widened = dense, widened
        form = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        self.config = dense.config if widened else {**dense.config, "quantization_config": form}

    def names(self) -> set[str]:
        names = set(self.dense.names())
        return names if self.widened else names | {f"{name}_scale_inv" for name in names if is_linear(name)}

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        stem = name.removesuffix("_scale_inv")
        weight = self.dense.tensor(stem, "cpu").to(device)
        if not is_linear(stem):
            return weight
        rows, columns = (-(-side // 128) for side in weight.shape)
        scale = 2.0 ** (torch.arange(rows * columns, device=weight.device) % 3 - 8.0).view(rows, columns)
        if name != stem:
            return scale
        wide = scale.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        rounded = (weight.float() / wide).to(FP8)
        return (rounded.float() * wide).to(weight.dtype) if self.widened else rounded


def test_a_checkpoint_in_fp8_tiles_stays_in_them() -> None:
    """Log-probabilities are those of the same numbers in bfloat16, up to its rounding."""
    if MODE != "device":
        return
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "kv_lora_rank": 64}
    dense = RandomCheckpoint({**CONFIG, **MODELS["v3"], **sizes, "q_lora_rank": 128}, dtype=BF16, embedding_scale=1.0)
    scores = []
    for weights in (InTiles(dense, widened=True), Fp8Checkpoint(InTiles(dense))):
        settings = EngineConfig(model="random", device="cuda", dtype="bfloat16", max_running=8, num_blocks=100)
        engine = Engine.load(settings, checkpoint=weights)
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        engine.submit(Request("a", [7 * i % 199 for i in range(120)], sampling))
        found = [one for delta in drain(engine) for one in delta.prompt_logprobs or () if one is not None]
        scores.append(torch.tensor([one.logprob for one in found]))
        tiles = [isinstance(linear, BlockFp8Linear) for linear in engine.runner.decoder.layers[0].linears]
        assert all(tiles) if isinstance(weights, Fp8Checkpoint) else not any(tiles), tiles
    check("log-probabilities from tiles", scores[1], scores[0], 3e-2)
    assert len(generate(engine, greedy("b", list(range(50)), 16))["b"]) == 16


def test_an_engine_in_deterministic_mode() -> None:
    if MODE != "device":
        return
    for dtype in ("float32", "bfloat16"):
        weights = RandomCheckpoint({**CONFIG, **MODELS["v3"]}, seed=5, dtype=getattr(torch, dtype), embedding_scale=1.0)
        settings = EngineConfig(
            model="random", device="cuda", dtype=dtype, deterministic=True, max_running=16, num_blocks=400
        )
        alone = Engine.load(settings, checkpoint=weights)
        requests = [greedy(f"r{n}", [rng.randrange(199) for _ in range(n)], 24) for n in (1, 17, 130, 300)]
        expected = {}
        for request in requests:
            expected |= generate(alone, request)
        for budget in (512, 64, 7):
            engine = Engine.load(dataclasses.replace(settings, token_budget=budget), checkpoint=weights)
            assert generate(engine, *requests) == expected, (dtype, budget)
