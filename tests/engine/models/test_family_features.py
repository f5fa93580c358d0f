"""What engines can do, on families whose layers are not Llama's: ranks, experts, adapters, few bits, drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.files import merge, write_adapter
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import COMMON, Reference, write_checkpoint
from tests.engine.tiny import FAMILIES as TINY

FAMILIES = (
    "lfm2", "lfm2-moe", "cohere-qknorm", "cohere2", "exaone4", "glm4", "glm4-moe", "llama4", "hunyuan", "minimax-m2",
    "phi", "stablelm", "mimo-v2-flash", "laguna",
    "minimax-m3", "step3.5", "muse-glimmer", "muse-spark",
)  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TIE = 2e-2


class Checkpoints(dict[str, Path]):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __missing__(self, family: str) -> Path:
        self[family] = write_checkpoint(family, self.folder / family)
        return self[family]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def requests() -> list[Request]:
    """Prompts of very different lengths, so that steps mix prefill chunks and decodes."""
    return [greedy(f"r{i}", [(i * 17 + j * 5) % 190 for j in range(3 + 35 * i)], 10) for i in range(4)]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("phi-gqa", {"qk_layernorm": True}),
        ("olmoe", {"clip_qkv": 0.6}),
        ("ernie4.5-moe-some-dense", {"use_bias": True}),
    ],
)
def test_variants_of_a_family_on_ranks(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = write_checkpoint(family, tmp_path, **changes)
    reference = Reference(folder)
    alone = generate(make_engine(folder, token_budget=32), *requests())
    for request in requests():
        assert reference.agrees(list(request.prompt), alone[request.request_id]), request.request_id
    with threaded_engine(folder, 2, 1, token_budget=32) as engine:
        assert generate(engine, *requests()) == alone


@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "settings"),
    [
        ("cohere-qknorm", 2, 1, {}),
        pytest.param("cohere2", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("exaone4", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("glm4", 2, 1, {}, marks=pytest.mark.slow),
        pytest.param("glm4-moe", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("hunyuan-moe", 2, 3, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("minimax-m2", 2, 1, {}, marks=pytest.mark.slow),
        pytest.param("ernie4.5-moe", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("arcee", 2, 1, {}, marks=pytest.mark.slow),
        pytest.param("llama4", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("glm4-moe", 2, 1, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param("llama4", 2, 1, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("lfm2-moe", 2, 1, {"expert_parallel": True}, marks=pytest.mark.slow),
        ("stablelm-head-norms", 2, 1, {}),
        pytest.param("qwen4-exp", 2, 2, {}, marks=pytest.mark.slow),
        ("mimo-v2-flash", 2, 3, {}),
        pytest.param("mimo-v2-flash", 4, 1, {}, marks=pytest.mark.slow),
        pytest.param("mimo-v2-flash", 2, 1, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param(
            "mimo-v2-flash-some-dense",
            2,
            2,
            {"expert_parallel": True, "attention_parallel": "data"},
            marks=pytest.mark.slow,
        ),
        pytest.param("laguna", 2, 2, {}, marks=pytest.mark.slow),  # quick: blocks of grids in test_laguna.py
        pytest.param("laguna", 4, 1, {}, marks=pytest.mark.slow),
        pytest.param("laguna", 2, 3, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("laguna", 2, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param("laguna-elements", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("step3.5", 2, 3, {}, marks=pytest.mark.slow),  # quick: with adapters, in test_newer_families.py
        pytest.param("step3.5", 2, 1, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("step3.5-biased", 2, 2, {}, marks=pytest.mark.slow),
        pytest.param("step3.5", 2, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param("minimax-m3", 2, 2, {}, marks=pytest.mark.slow),  # quick: blocks of grids in test_minimax_m3.py
        pytest.param("minimax-m3", 4, 1, {}, marks=pytest.mark.slow),  # two KV heads for four shards
        pytest.param("minimax-m3", 2, 3, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param(
            "minimax-m3", 2, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow
        ),
        pytest.param("minimax-m3-shared-choice", 4, 1, {}, marks=pytest.mark.slow),
        ("muse-glimmer", 2, 2, {}),
        pytest.param("muse-glimmer", 4, 1, {}, marks=pytest.mark.slow),
        pytest.param("muse-glimmer-other", 2, 3, {}, marks=pytest.mark.slow),
        ("muse-spark", 2, 2, {}),
        pytest.param("muse-spark", 4, 1, {}, marks=pytest.mark.slow),
        pytest.param("muse-spark", 2, 3, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param(
            "muse-spark", 2, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow
        ),
        pytest.param("muse-spark-some-dense", 2, 2, {}, marks=pytest.mark.slow),
        pytest.param("hrm-text", 2, 1, {}, marks=pytest.mark.slow),
        pytest.param("axk2", 2, 3, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("hy-v4", 2, 2, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("phi", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("starcoder2", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("apertus", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("granite-swa", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("granite-moe-swa-shared", 2, 1, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("afmoe", 2, 3, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("cohere2-moe", 2, 1, {"expert_parallel": True}, marks=pytest.mark.slow),
        pytest.param("cohere2-moe-sigmoids", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("axk1", 2, 3, {}, marks=pytest.mark.slow),
        pytest.param("afmoe", 2, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param("lfm2-moe", 2, 2, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
        pytest.param("llama4", 2, 1, {"expert_parallel": True, "attention_parallel": "data"}, marks=pytest.mark.slow),
    ],
)
def test_ranks_give_the_output_of_one_device(
    checkpoints: Checkpoints, family: str, tensor: int, pipeline: int, settings: dict[str, Any]
) -> None:
    expected = generate(make_engine(checkpoints[family], token_budget=32), *requests())
    with threaded_engine(checkpoints[family], tensor, pipeline, token_budget=32, **settings) as engine:
        assert generate(engine, *requests()) == expected
        assert_idle(engine)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("cohere-qknorm", (*ATTENTION, "gate_proj", "up_proj", "down_proj")),
        pytest.param("exaone4", (*ATTENTION, "down_proj"), marks=pytest.mark.slow),
        pytest.param("glm4", ATTENTION, marks=pytest.mark.slow),
        pytest.param("glm4-moe", ATTENTION, marks=pytest.mark.slow),
        pytest.param("hunyuan", ATTENTION, marks=pytest.mark.slow),
        pytest.param("arcee", (*ATTENTION, "up_proj", "down_proj"), marks=pytest.mark.slow),
        pytest.param("llama4", ATTENTION, marks=pytest.mark.slow),
        pytest.param("phi", ("q_proj", "dense", "fc1", "fc2"), marks=pytest.mark.slow),
        pytest.param("stablelm", (*ATTENTION, "down_proj"), marks=pytest.mark.slow),
        pytest.param("olmo", (*ATTENTION, "up_proj"), marks=pytest.mark.slow),
        pytest.param("afmoe", ("q_proj", "gate_proj", "o_proj"), marks=pytest.mark.slow),
        pytest.param("minicpm3", ("q_b_proj", "o_proj", "up_proj"), marks=pytest.mark.slow),
        pytest.param("qwen4-exp", (*ATTENTION, "out_proj"), marks=pytest.mark.slow),
    ],
)
def test_an_adapter_equals_merging_it(
    checkpoints: Checkpoints, tmp_path: Path, family: str, targets: tuple[str, ...]
) -> None:
    """Whatever order the rotated dimensions are in."""
    base = checkpoints[family]
    adapter = write_adapter(tmp_path / "adapter", base, targets=targets)
    merged, plain = Reference(merge(base, adapter, tmp_path / "merged")), Reference(base)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=40, num_blocks=60)
    prompts = [[(7 * i + 13 * j) % 199 for j in range(20 + 30 * i)] for i in range(4)]
    params = SamplingParams(max_tokens=12, temperature=0.0)
    got = generate(
        engine,
        *(Request(f"r{i}", prompt, params, adapter="tuned" if i % 2 else "") for i, prompt in enumerate(prompts)),
    )
    for i, prompt in enumerate(prompts):
        assert (merged if i % 2 else plain).agrees(prompt, got[f"r{i}"], TIE), i
    assert_idle(engine)


def test_the_decoder_of_a_llama4_that_takes_images(tmp_path: Path) -> None:
    text = transformers.Llama4TextConfig(**{**COMMON, **TINY["llama4"][1]})
    vision = transformers.Llama4VisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=28, patch_size=14,
        vision_output_dim=16, projector_input_dim=16, projector_output_dim=16,
    )  # fmt: skip
    config = transformers.Llama4Config(text_config=text.to_dict(), vision_config=vision.to_dict())
    torch.manual_seed(3)
    model = transformers.Llama4ForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    prompt = [(j * 31) % 190 for j in range(70)]
    got = generate(make_engine(tmp_path), greedy("a", prompt, 8))["a"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + got[:-1]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == got


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({"weights": "int8"}, 1.5),
        ({"weights": "int4"}, 8.0),
        ({"kv_dtype": "int8"}, 1.0),
        ({"kv_dtype": "fp8"}, 4.0),
        ({"speculation": "ngram"}, TIE),
        ({"deterministic": True}, TIE),
    ],
    ids=str,
)
def test_few_bits_and_drafts(checkpoints: Checkpoints, family: str, settings: dict[str, Any], bound: float) -> None:
    """Tokens that the reference finds nearly as likely as the best: logits of these models spread over tens."""
    reference = Reference(checkpoints[family])
    got = generate(make_engine(checkpoints[family], token_budget=32, **settings), *requests())
    for request in requests():
        margins = reference.margins(request.prompt, got[request.request_id][:6])
        assert float(margins.median()) < bound, margins
