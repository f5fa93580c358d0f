"""gpt-oss with experts in MXFP4: the tokens of the reference, from a folder, a GGUF file, and over several ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Mxfp4Config

from penstock.engine.backends.cpu.mxfp4_linear import Mxfp4Linear
from penstock.engine.core import Engine
from penstock.engine.loading.mxfp4 import Mxfp4
from penstock.engine.models.layers.linear import Linear
from penstock.errors import CheckpointError, PenstockError
from tests.engine.gpt_oss_files import CONFIG, write_mxfp4
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.loading.test_gguf_families import convert
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference

RNG = random.Random(3)
PROMPTS = {f"r{n}": [RNG.randrange(199) for _ in range(n)] for n in (1, 17, 70, 140)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mxfp4(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    got = generate(make_engine(folder), *(greedy(name, prompt, 10) for name, prompt in PROMPTS.items()))
    reference = Reference.__new__(Reference)
    reference.model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", quantization_config=Mxfp4Config(dequantize=True)
    ).eval()
    # The reference dequantizes to bfloat16, which holds every value of MXFP4.
    reference.model = reference.model.float()
    for name, prompt in PROMPTS.items():
        assert len(got[name]) == 10 and reference.agrees(prompt, got[name], 1e-4), name
    return got


def linears_of(engine: Engine) -> list[Linear]:
    experts: Any = engine.runner.decoder.layers[0].feed_forward
    return [linear for expert in experts.experts for linear in expert.linears]


def test_experts_run_as_stored_and_equal_the_reference(folder: Path, expected: dict[str, list[int]]) -> None:
    engine = make_engine(folder, token_budget=48, num_blocks=40, max_running=3)
    assert all(isinstance(linear, Mxfp4Linear) for linear in linears_of(engine))
    assert generate(engine, *(greedy(name, prompt, 10) for name, prompt in PROMPTS.items())) == expected
    assert_idle(engine)


@pytest.mark.parametrize("settings", [{"weights": "dense"}, {"deterministic": True}], ids=str)
def test_other_forms_give_the_same_tokens(
    settings: dict[str, object], folder: Path, expected: dict[str, list[int]]
) -> None:
    assert generate(make_engine(folder, **settings), greedy("r70", PROMPTS["r70"], 10))["r70"] == expected["r70"]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_caches_in_few_bits_stay_close(kv_dtype: str, folder: Path, expected: dict[str, list[int]]) -> None:
    """Sinks are compared with scores as they are: key smoothing may not shift them."""
    got = generate(make_engine(folder, kv_dtype=kv_dtype), greedy("r140", PROMPTS["r140"], 10))["r140"]
    assert len(got) == 10 and (kv_dtype == "fp8" or got[:2] == expected["r140"][:2])


def test_stacks_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    path = write_mxfp4(tmp_path, num_hidden_layers=1)
    tensors = load_file(path / "model.safetensors")
    stack = "model.layers.0.mlp.experts.down_proj"
    for name, broken in (
        (f"{stack}_scales", tensors[f"{stack}_scales"][:, :-1]),
        (f"{stack}_blocks", tensors[f"{stack}_blocks"][..., :8]),
    ):
        save_file({**tensors, name: broken.contiguous()}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match="down_proj"):
            make_engine(path)
    save_file({n: t for n, t in tensors.items() if n != f"{stack}_scales"}, path / "model.safetensors")
    with pytest.raises(PenstockError, match="down_proj_scales"):
        make_engine(path)


def widen(folder: Path, target: Path) -> Path:
    """The same checkpoint with dense experts."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(name), tensors.pop(name.replace("_blocks", "_scales"))
        dense = [Mxfp4(b.flatten(1), s).dense().T for b, s in zip(blocks, scales, strict=True)]
        tensors[name.removesuffix("_blocks")] = torch.stack(dense)
    rope = {**CONFIG["rope_scaling"], "rope_theta": CONFIG["rope_theta"]}
    config = {**CONFIG, "swiglu_limit": 7.0, "rope_scaling": None, "rope_parameters": rope, "rms_norm_eps": 1e-5}
    config.pop("quantization_config")
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def test_dense_stacks_and_a_gguf_file_give_the_same_tokens(tmp_path: Path) -> None:
    """GGUF files have no key for the limit of the gate: it is the usual one."""
    folder = write_mxfp4(tmp_path / "packed", swiglu_limit=7.0)
    dense, asked = widen(folder, tmp_path / "dense"), greedy("a", PROMPTS["r140"], 10)
    expected = generate(make_engine(folder), asked)
    assert generate(make_engine(dense), asked) == expected
    engine = make_engine(convert(dense, "gpt-oss", GGMLQuantizationType.MXFP4))
    assert all(isinstance(linear, Mxfp4Linear) for linear in linears_of(engine))
    assert generate(engine, asked) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("ffn", "settings"), [(96, {}), (128, {}), (96, {"expert_parallel": True})], ids=str)
def test_two_ranks_give_the_same_tokens(ffn: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Sinks and biases are cut by heads; a width of 96 is cut through a block, so down matrices are dense there."""
    folder = write_mxfp4(tmp_path, intermediate_size=ffn)
    expected = generate(make_engine(folder), *(greedy(name, prompt, 10) for name, prompt in PROMPTS.items()))
    with threaded_engine(folder, 2, 1, **settings) as engine:
        assert generate(engine, *(greedy(name, prompt, 10) for name, prompt in PROMPTS.items())) == expected
