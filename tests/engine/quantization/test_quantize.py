"""Making few-bit checkpoints: GPTQ and AWQ beat rounding to nearest, and what is written reads back the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.bench.perplexity import distance, score
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.checkpoint import Checkpoint, open_checkpoint
from penstock.engine.models.decoder import DecoderLayer
from penstock.engine.models.families import read_config
from penstock.engine.quantization.awq import round_clipped, search_scales
from penstock.engine.quantization.calibration import ObservedLinear, calibrate
from penstock.engine.quantization.gptq import gptq
from penstock.engine.quantization.grids import round_zero_point
from penstock.engine.quantization.quantize import Recipe, RoundedCheckpoint, _scale, pick_group, quantize
from penstock.engine.quantization.writer import ShardWriter
from penstock.errors import ConfigError
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint

CPU = torch.device("cpu")


def inputs(count: int, width: int) -> Tensor:
    """Activations as models have them: correlated, and a few channels far larger than the others."""
    torch.manual_seed(5)
    x = torch.randn(count, width // 4) @ torch.randn(width // 4, width) + 0.3 * torch.randn(count, width)
    x[:, ::17] *= 20
    return x


def output_error(changed: Tensor, weight: Tensor, x: Tensor) -> float:
    return float(((changed - weight) @ x.T).square().mean())


def test_gptq_leaves_less_error_in_the_outputs_than_rounding() -> None:
    seen, fresh = inputs(2000, 128).split([1500, 500])
    weight = torch.randn(48, 128)
    hessian = seen.T @ seen
    nearest = output_error(round_zero_point(weight, 32).dense(), weight, fresh)
    for act_order in (False, True):
        for symmetric in (False, True):
            groups = gptq(weight, hessian / 1500, 1500, 32, act_order=act_order, symmetric=symmetric)
            baseline = output_error(round_zero_point(weight, 32, symmetric).dense(), weight, fresh)
            assert output_error(groups.dense(), weight, fresh) < 0.5 * baseline
            assert (groups.order is not None) == act_order
    assert nearest > 0


def test_awq_scales_and_ranges_leave_less_error_than_rounding() -> None:
    x = inputs(1500, 128)
    weight = torch.randn(48, 128)
    hessian = x.T @ x
    scales = search_scales(weight, hessian, x.abs().mean(0), 32)
    rounded = round_zero_point(weight * scales, 32).dense() / scales
    nearest = output_error(round_zero_point(weight, 32).dense(), weight, x)
    scaled = output_error(rounded, weight, x)
    assert scaled < 0.7 * nearest
    clipped = round_clipped(weight * scales, hessian / scales / scales[:, None], 32).dense() / scales
    assert output_error(clipped, weight, x) < scaled
    assert scales[::17].mean() > scales.mean()  # the large channels are the protected ones


def test_inputs_that_calibration_never_saw_do_no_harm() -> None:
    x = inputs(300, 64)
    x[:, 7] = 0
    groups = gptq(torch.randn(16, 64), x.T @ x / 300, 300, 32)
    assert bool(groups.dense().isfinite().all())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose norms let some channels through much larger than others, as real ones do."""
    folder = write_checkpoint("llama-mha-bias", tmp_path_factory.mktemp("model"), spread=0.3)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(2)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensors[name] = torch.where(torch.rand(len(tensor)) < 0.08, tensor * 12, tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def texts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 199, (64,), generator=generator).tolist() for _ in range(count)]


def scores(path: Path, checkpoint: Checkpoint) -> object:
    config = EngineConfig(str(path), device="cpu", dtype="float32", weights="dense", threads=1, max_model_len=96)
    return score(Engine.load(config, checkpoint=checkpoint), texts(6, seed=1))


def make(source: Path, folder: Path, recipe: Recipe) -> list[tuple[str, int, int]]:
    seen: list[tuple[str, int, int]] = []
    quantize(
        open_checkpoint(source),
        recipe,
        texts(24, seed=0),
        folder,
        lambda *report: seen.append(report),
        device=CPU,
        threads=1,
    )
    return seen


def test_gptq_and_awq_models_are_closer_to_the_original_than_a_rounded_one(model: Path, tmp_path: Path) -> None:
    reference = scores(model, open_checkpoint(model))
    nearest = distance(scores(model, RoundedCheckpoint(open_checkpoint(model), 32)), reference)
    for recipe in (Recipe("gptq-int4", 32), Recipe("gptq-int4", 32, act_order=True), Recipe("awq-int4", 32)):
        folder = tmp_path / f"{recipe.method}-{recipe.act_order}"
        make(model, folder, recipe)
        made = distance(scores(model, open_checkpoint(folder)), reference)
        assert made.divergence < 0.9 * nearest.divergence, (recipe, made, nearest)


@pytest.mark.parametrize(
    "family",
    [
        "mixtral",
        "lfm2",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in (
                "minicpm3-plain",
                "phi",
                "starcoder2",
                "bamba",
                "falcon-h1",
                "mamba2",
                "qwen3-next-dense",
                "gemma4",
                "afmoe",
                "mimo-v2-flash",
                "laguna",
                "minimax-m3",
                "step3.5",
                "mistral-large4-own",
                "muse-glimmer",
                "muse-spark-some-dense",
                "glm5-next-shared",
            )
        ),
    ],
)
def test_layers_of_every_kind_are_calibrated(family: str, tmp_path: Path) -> None:
    """Experts, short convolutions, biases of norms, one norm for two parts, states, gates: scales are folded only where
    that changes nothing else, which a model that is worse than a rounded one would show."""
    source = write_checkpoint(family, tmp_path / "source", spread=0.3)
    reference = scores(source, open_checkpoint(source))
    nearest = distance(scores(source, RoundedCheckpoint(open_checkpoint(source), 32)), reference)
    for method, limit in (("gptq-int4", 0.95), ("awq-int4", 1.05)):
        made = make(source, tmp_path / method, Recipe(method, 32))  # type: ignore[arg-type]
        assert made[-1][1] == made[-1][2]
        loss = distance(scores(source, open_checkpoint(tmp_path / method)), reference)
        assert loss.divergence < limit * nearest.divergence, (method, loss, nearest)


MUSE = ("muse-glimmer", "muse-spark-some-dense")


@pytest.mark.parametrize(
    "family", ["cohere", "phi", "gemma4", "bamba", "afmoe", "olmo-biased", "mimo-v2-flash", "laguna", "step3.5", *MUSE]
)
def test_folded_scales_change_nothing(family: str, tmp_path: Path) -> None:
    """What all matrices of a model read, with AWQ's scales in the layers before them and without."""
    source = open_checkpoint(write_checkpoint(family, tmp_path, spread=0.3))
    model, seen = read_config(source.config), list[list[Tensor]]()
    for scaled in (False, True):
        inputs: list[Tensor] = []

        def change(
            layer: DecoderLayer,
            linears: Sequence[ObservedLinear],
            scaled: bool = scaled,
            inputs: list[Tensor] = inputs,
        ) -> DecoderLayer:
            inputs.extend(linear.hessian.clone() for linear in linears)
            return _scale(model, layer, 16, source.names(), {}) if scaled else layer

        assert list(calibrate(source, texts(2, seed=1), change, CPU, 1))
        seen.append(inputs)
    for plain, scaled_one in zip(*seen, strict=True):
        assert float((scaled_one - plain).norm()) < 1e-4 * float(plain.norm())


SIZES = {
    "hrm-text": {},
    "qwen4-exp": {
        "indexer_head_dim": 16,
        "shared_expert_intermediate_size": 64,
        "ple_embed_dim": 64,
        "initializer_range": 0.3,
    },
    "deepseek-v4": {
        "head_dim": 32,
        "q_lora_rank": 32,
        "o_lora_rank": 16,
        "moe_intermediate_size": 32,
        "intermediate_size": 32,
        "index_head_dim": 16,
    },
}
"""In place of some that groups do not divide."""


@pytest.mark.parametrize(
    "family",
    ["hrm-text", *(pytest.param(family, marks=pytest.mark.slow) for family in ("qwen4-exp", "deepseek-v4"))],
)
def test_layers_that_look_up_token_ids_or_run_several_times(family: str, tmp_path: Path) -> None:
    source = write_checkpoint(family, tmp_path / "source", spread=0.3, **SIZES[family])
    reference = scores(source, open_checkpoint(source))
    nearest = distance(scores(source, RoundedCheckpoint(open_checkpoint(source), 32)), reference)
    for method in ("gptq-int4", "awq-int4"):
        made = make(source, tmp_path / method, Recipe(method, 32))  # type: ignore[arg-type]
        assert made[-1][1] == made[-1][2]
        checkpoint = open_checkpoint(tmp_path / method)
        assert set(checkpoint.names()) == set(open_checkpoint(source).names())
        assert distance(scores(source, checkpoint), reference).divergence < 0.98 * nearest.divergence, method


def test_a_matrix_that_words_cannot_hold_is_named(tmp_path: Path) -> None:
    """Eight outputs share a word of zero points."""
    sizes = {**SIZES["qwen4-exp"], "indexer_head_dim": 12}
    source = write_checkpoint("qwen4-exp", tmp_path / "source", **sizes)
    with pytest.raises(ConfigError, match=r"index_qk_proj\.weight: 204 outputs.*use int8 or fp8"):
        make(source, tmp_path / "made", Recipe("gptq-int4", 32))


def test_matrices_that_are_not_multiplied_as_they_are_stored(tmp_path: Path) -> None:
    """Those that make keys and values of latents: in the checkpoint all the same."""
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    source = write_checkpoint("deepseek-v2-lite", tmp_path / "source", spread=0.3, moe_intermediate_size=32, **sizes)
    reference = scores(source, open_checkpoint(source))
    nearest = distance(scores(source, RoundedCheckpoint(open_checkpoint(source), 32)), reference)
    for method in ("gptq-int4", "awq-int4"):
        make(source, tmp_path / method, Recipe(method, 32))  # type: ignore[arg-type]
        checkpoint = open_checkpoint(tmp_path / method)
        assert set(checkpoint.names()) == set(open_checkpoint(source).names())
        assert distance(scores(source, checkpoint), reference).divergence < 1.05 * nearest.divergence, method


def test_whole_numbers_stay_whole(tmp_path: Path) -> None:
    """Factors of hashes have too many digits for any type of weights."""
    source = open_checkpoint(write_checkpoint("qwen4-exp", tmp_path / "source", spread=0.3))
    make(tmp_path / "source", tmp_path / "int8", Recipe("int8"))
    written = open_checkpoint(tmp_path / "int8")
    whole = [name for name in source.names() if not source.tensor(name).is_floating_point()]
    assert any(name.endswith("layer_multipliers") for name in whole)
    for name in whole:
        assert written.tensor(name).tolist() == source.tensor(name).tolist(), name


@pytest.mark.parametrize("method", ["int8", "fp8", "gptq-int4", "awq-int4"])
def test_what_is_written_loads_small_and_answers_as_its_values_do(method: str, model: Path, tmp_path: Path) -> None:
    folder = tmp_path / method
    seen = make(model, folder, Recipe(method, 32 if "int4" in method else None))  # type: ignore[arg-type]
    assert seen[-1][1] == seen[-1][2] > 0
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] in ("gptq", "awq", "compressed-tensors")
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.names()) == set(open_checkpoint(model).names())
    # The same values in a dense checkpoint, run by the reference.
    same = tmp_path / "dense"
    same.mkdir()
    save_file({n: checkpoint.tensor(n).float().contiguous() for n in checkpoint.names()}, same / "model.safetensors")
    (same / "config.json").write_text((model / "config.json").read_text())
    prompt = [5, 80, 3, 121]
    output = generate(make_engine(folder), greedy("a", prompt, 10))["a"]
    assert Reference(same).agrees(prompt, output, tie=0.05)


def test_gptq_words_hold_what_other_programs_expect(model: Path, tmp_path: Path) -> None:
    """Unpacked here by hand: inputs along words, zero points less one, the group of every input."""
    make(model, tmp_path / "out", Recipe("gptq-int4", 32, act_order=True))
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    base = "model.layers.1.mlp.down_proj."
    words, zeros = (tensors[f"{base}{part}"].numpy().view(np.uint32) for part in ("qweight", "qzeros"))
    scales, group_of = tensors[f"{base}scales"].double().numpy(), tensors[f"{base}g_idx"].numpy()
    dense = np.zeros((64, 96))
    for n in range(64):
        for k in range(96):
            q = int(words[k // 8, n]) >> 4 * (k % 8) & 15
            z = (int(zeros[group_of[k], n // 8]) >> 4 * (n % 8) & 15) + 1
            dense[n, k] = (q - z) * scales[group_of[k], n]
    np.testing.assert_allclose(open_checkpoint(tmp_path / "out").tensor(f"{base}weight").numpy(), dense, atol=1e-6)
    original = open_checkpoint(model).tensor(f"{base}weight").double().numpy()
    assert np.linalg.norm(dense - original) < 0.2 * np.linalg.norm(original)


@pytest.mark.parametrize(
    "family",
    [
        "llama-gqa",
        "gemma4-small",
        "deepseek-v4",
        "glm-dsa",
        "qwen4-exp",
        "mistral-large4",
        "muse-spark",
        pytest.param("glm5-next", marks=pytest.mark.slow),
    ],
)
def test_layer_by_layer_is_the_whole_model(family: str, tmp_path: Path) -> None:
    """What calibration computes between layers is what the decoder computes in one go, also where upper layers attend
    to the keys of lower ones or to what they chose, and where tokens name their experts."""
    model, last = write_checkpoint(family, tmp_path), dict[str, Tensor]()

    def look(layer, linears):  # type: ignore[no-untyped-def]
        last["hessian"] = linears[0].hessian
        return layer

    windows = texts(2, seed=3)
    reference = Reference(model).model
    layers, seen = reference.model.layers, list[Tensor]()
    assert list(calibrate(open_checkpoint(model), windows, look, CPU, 1)) == list(range(1, len(layers) + 1))
    attention = layers[-1].self_attn
    first = attention.q_a_proj if family in ("deepseek-v4", "glm-dsa", "glm5-next") else attention.q_proj
    first.register_forward_hook(lambda _m, args, _o: seen.extend(args[0]))
    with torch.inference_mode():
        reference(torch.tensor(windows))
    inputs = torch.cat(seen)
    want = inputs.T @ inputs / len(inputs)
    assert float((last["hessian"] - want).norm() / want.norm()) < 1e-4


def test_a_group_size_that_does_not_fit_is_refused(model: Path) -> None:
    config = open_checkpoint(model).config
    assert pick_group(config, None) == 32
    for wanted in (64, 48):
        with pytest.raises(ConfigError, match="groups of"):
            pick_group(config, wanted)


def test_large_checkpoints_are_cut_into_shards(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, limit=1000)
    for i in range(5):
        writer.add(f"t{i}", torch.full((100,), float(i)))
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000 and len(set(index["weight_map"].values())) == 3
    for i in range(5):
        assert load_file(tmp_path / index["weight_map"][f"t{i}"])[f"t{i}"][0] == i
