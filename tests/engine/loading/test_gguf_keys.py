"""Every metadata key of llama.cpp is honoured or refused in every architecture: never ignored."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch

from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.engine.loading.gguf import GGUFFile, TensorInfo
from penstock.engine.loading.gguf_config import config_from_gguf
from penstock.engine.loading.gguf_keys import INERT, OTHERS, READ
from penstock.engine.models.families import FAMILIES, GGUFKeys, family_of_gguf, gguf_architectures, read_config
from penstock.engine.models.families.family import AXES
from penstock.engine.models.layers.rotary import cos_sin_table
from penstock.errors import CheckpointError, PenstockError
from tests import parts
from tests.engine.harness import drain, make_engine
from tests.engine.loading import test_gguf_families
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.loading.test_gguf_checkpoint import metadata, weights
from tests.engine.tiny import write_checkpoint

REFERENCE = {
    value.removeprefix("{arch}.")
    for group in (gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Attention.Indexer, gguf.Keys.Rope, gguf.Keys.SSM,
                  gguf.Keys.WKV, gguf.Keys.KDA, gguf.Keys.PosNet, gguf.Keys.ConvNext, gguf.Keys.Classifier,
                  gguf.Keys.ShortConv)
    for name, value in vars(group).items()
    if isinstance(value, str) and value.startswith("{arch}.") and "{dense}" not in value
} | {"rope.scale_linear", "attention.value_scale"}  # fmt: skip
TRIED: list[Any] = [3, 2.5, True, False, "yarn", "x", [1, 0], [2.5, 1.0]]
AT_WORK = {
    "rope.scaling.original_context_length": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "rope.scaling.yarn_beta_fast": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "rope.scaling.yarn_beta_slow": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "rope.scaling.yarn_log_multiplier": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "rope.scaling.yarn_attn_factor": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "rope.scaling.yarn_ext_factor": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "rope.scaling.type": {"rope.scaling.factor": 4.0},
    "attention.sliding_window_pattern": {"attention.sliding_window": 30},
    "attention.temperature_scale": {"rope.scaling.original_context_length": 64},
}
"""What must be in a file for a key to have an effect in llama.cpp."""
PATTERN = "attention.sliding_window_pattern"
DELTA_NETS: dict[str, Any] = {
    "ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.inner_size": 96, "ssm.state_size": 16, "ssm.time_step_rank": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "ssm.conv_kernel": 4, "ssm.group_count": 2, "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4,
    "attention.head_count_kv": [0, 2],
}  # fmt: skip
ROUTED: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8}
LATENTS: dict[str, Any] = {
    **ROUTED, "attention.kv_lora_rank": 32, "attention.q_lora_rank": 24, "attention.key_length": 24,
    "attention.value_length": 20, "attention.head_count_kv": 1, "rope.dimension_count": 8,
    "rope.scaling.yarn_log_multiplier": 0.1,
}  # fmt: skip
INDEXED: dict[str, Any] = {
    **LATENTS, "attention.indexer.head_count": 2, "attention.indexer.key_length": 8, "attention.indexer.top_k": 24,
}  # fmt: skip
NEEDED: dict[str, dict[str, Any]] = {
    "kimi-linear": {
        **ROUTED, "attention.kv_lora_rank": 32, "attention.key_length_mla": 24, "attention.value_length_mla": 20,
        "attention.head_count_kv": [0, 1], "rope.dimension_count": 8, "ssm.conv_kernel": 4, "kda.head_dim": 16,
    },
    "mistral4": LATENTS,
    "deepseek32": INDEXED,
    "glm-dsa": INDEXED,
    "minicpm3": {
        "attention.kv_lora_rank": 32, "attention.q_lora_rank": 24, "attention.key_length": 24,
        "rope.dimension_count": 8, "attention.head_count_kv": 4,
    },
    "gemma4": {
        "attention.key_length": 8, "attention.key_length_swa": 4, "attention.value_length_swa": 4,
        "attention.sliding_window": 30, PATTERN: [True, False],
    },
    "afmoe": {**ROUTED, "expert_shared_count": 1, "attention.sliding_window": 30},
    "hy_v3": ROUTED,
    "mellum": ROUTED,
    "laguna": {**ROUTED, "attention.sliding_window": 30},
    "mimo2": {
        **ROUTED, "attention.head_count_kv": [2, 4], "attention.sliding_window": 30, PATTERN: [False, True],
    },
    "step35": {
        **ROUTED, "expert_shared_feed_forward_length": 8, "expert_weights_norm": True,
        "attention.sliding_window": 30, PATTERN: [False, True],
    },
    "cohere2moe": {
        **ROUTED, "attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5, "attention.sliding_window": 30,
    },
    "granite_swa": {"attention.sliding_window": 30, PATTERN: [True, False]},
    "granitehybrid": MAMBA,
    "falcon-h1": {**MAMBA, "attention.head_count_kv": 2},
    "nemotron_h": MAMBA,
    "nemotron_h_moe": {**MAMBA, **EXPERTS, "feed_forward_length": [32, 0]},
    "mamba2": {**MAMBA, "attention.head_count": 0, "attention.head_count_kv": 0, "feed_forward_length": 0},
    "qwen3moe": {"expert_count": 2, "expert_used_count": 1},
    "deepseek2": {
        "attention.kv_lora_rank": 32, "attention.key_length": 24, "attention.value_length": 20,
        "attention.head_count_kv": 1, "rope.dimension_count": 8, "expert_count": 4, "expert_used_count": 2,
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
    "glm4moe": {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_count": 1,
    },
    "exaone-moe": {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_count": 1,
        "attention.sliding_window": 30,
    },
    "dots1": {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_count": 1,
    },
    "hunyuan-moe": {"expert_count": 4, "expert_used_count": 2},
    "minimax-m2": {"expert_count": 4, "expert_used_count": 2, "expert_gating_func": 2},
    "ernie4_5-moe": {
        "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, "expert_shared_count": 1,
    },
    "llama4": {
        "expert_count": 4, "expert_used_count": 1, "expert_feed_forward_length": 8, "interleave_moe_layer_step": 1,
    },
    "command-r": {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5},
    "cohere2": {"attention.layer_norm_epsilon": 1e-5, "logit_scale": 0.5, "attention.sliding_window": 30},
    **{
        arch: {"attention.layer_norm_epsilon": 1e-5}
        for arch in ("jais2", "nemotron", "olmo", "phi2", "stablelm", "starcoder2")
    },
    "lfm2": {"shortconv.l_cache": 4, "attention.head_count_kv": [0, 2]},
    "lfm2moe": {
        "shortconv.l_cache": 4, "attention.head_count_kv": [0, 2], "expert_count": 4, "expert_used_count": 2,
        "expert_feed_forward_length": 8, "leading_dense_block_count": 1,
    },
    "qwen3next": DELTA_NETS | EXPERTS,
    "qwen35": DELTA_NETS,
    "qwen35moe": DELTA_NETS | EXPERTS,
}  # fmt: skip
"""What llama.cpp loads no file of the architecture without."""


SAYING = {
    "deepseek2", "glm4moe", "nemotron_h_moe", "exaone-moe", "dots1", "cohere2moe", "deepseek32", "glm-dsa", "mistral4",
}  # fmt: skip
"""Architectures whose files say that the weights of experts are normalized, where they are."""
WITH = {
    "gemma4": {"rope_freqs.weight": np.array([1.0, 1e30, 1e30, 1e30], np.float32)},
    "laguna": {f"blk.{layer}.attn_gate.weight": np.ones((4, 32), np.float32) for layer in range(2)},
}
"""What no file of these architectures leaves out: how much of a head is rotated, and the gates of heads."""
WEIGHTS = weights()
"""Read by nobody here; only which there are, and their shapes."""


class Described:
    """What is read of a GGUF file, without a file."""

    def __init__(self, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        self.path = Path("m.gguf")
        self.metadata = {key: np.array(value) if isinstance(value, list) else value for key, value in keys.items()}
        self.tensors = {name: TensorInfo(name, 0, data.shape, 0) for name, data in tensors.items()}
        self._data = tensors

    def floats(self, name: str) -> list[float]:
        return [float(number) for number in self._data[name]]


def config(arch: str, keys: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> dict[str, Any]:
    given = metadata(arch, **{**NEEDED.get(arch, {}), **keys})
    needed = WITH.get(arch, {})
    return config_from_gguf(cast(GGUFFile, Described(given, WEIGHTS | needed | (tensors or {}))))


def test_every_key_of_the_reference_is_declared() -> None:
    families = frozenset().union(*(family.gguf.reads for family in FAMILIES.values()))
    known = READ | INERT | OTHERS | families | {"attention.causal", "expert_gating_func", "expert_weights_norm"}
    assert set(REFERENCE) <= known
    assert not READ & OTHERS and not READ & INERT and not INERT & OTHERS


@pytest.mark.parametrize("arch", gguf_architectures())
def test_each_key_is_honoured_or_refused(arch: str) -> None:
    """A value that is accepted changes the configuration, says nothing, or belongs to a key that does nothing."""
    epsilons = {family.gguf.epsilon for family in FAMILIES.values() if arch in family.gguf.architectures}
    for key in sorted(REFERENCE):
        unscaled = arch == "gemma4" and key.startswith("rope.")
        beside = {} if unscaled or (key == PATTERN and not reads_patterns(arch)) else AT_WORK.get(key, {})
        base = config(arch, beside)
        for value in TRIED:
            try:
                found = config(arch, {**beside, key: value})
            except CheckpointError as error:
                name = key.removeprefix("attention.").removeprefix("rope.").removeprefix("scaling.")
                assert name in str(error) or key in READ, (key, value, str(error))
                continue
            assert found != base or key in INERT - epsilons or _means_nothing(key, value, arch), (key, value)


def reads_patterns(arch: str) -> bool:
    """Whether a file with a window may say which layers have it."""
    family = family_of_gguf(GGUFKeys(arch, metadata(arch, **AT_WORK[PATTERN])))
    return family is not None and PATTERN in family.gguf.reads


def _means_nothing(key: str, value: Any, arch: str) -> bool:
    if key == PATTERN and reads_patterns(arch):
        return True  # of two layers many patterns mean the same; they have a test of their own
    if key == "use_parallel_residual" and arch == "stablelm":
        return True  # which layers' norms say
    if key in AXES:
        return True  # of images: for text all axes are the position, and nothing is added to layers
    if arch == "mamba2" and key.startswith(("attention.", "rope.", "feed_forward", "context_")):
        return True  # it has no attention, no positions and no feed-forward
    if arch == "nemotron_h" and key.startswith(("expert_", "moe_")):
        return True  # of experts that the file does not have
    rotation = key.startswith("rope.") and key != "rope.dimension_count"
    if arch == "kimi-linear" and (rotation or key == "attention.value_length"):
        return True  # nothing is rotated, and nothing has that size
    if arch == "gemma4" and key.startswith("rope.scaling."):
        return True  # of scalings that its files may not have
    normalized = key == "expert_weights_norm" and arch not in SAYING
    return value is (normalized or key == "attention.causal")


def test_a_factor_without_a_type_is_linear() -> None:
    linear = {"rope_type": "linear", "factor": 4.0}
    for keys in (
        {"rope.scale_linear": 4.0},
        {"rope.scaling.factor": 4.0},
        {"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0},
    ):
        assert config("llama", keys)["rope_scaling"] == linear
    assert config("llama", {"rope.scaling.type": "none", "rope.scale_linear": 4.0})["rope_scaling"] is None


def table(raw: dict[str, Any], positions: int = 40) -> torch.Tensor:
    rope = read_config(raw).rope
    return cos_sin_table(rope, raw["head_dim"], positions, torch.device("cpu"))


@pytest.mark.parametrize("arch", ["llama", "mistral3", "qwen2"])
def test_attn_factor_multiplies_what_there_is(arch: str) -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    for keys in ({}, {"rope.scaling.factor": 4.0}, yarn):
        plain = table(config(arch, keys))
        torch.testing.assert_close(table(config(arch, {**keys, "rope.scaling.attn_factor": 1.5})), plain * 1.5)


def test_yarn_log_multiplier_divides_the_magnitude() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
    plain = table(config("mistral3", yarn))
    scaled = table(config("mistral3", {**yarn, "rope.scaling.yarn_log_multiplier": 0.5}))
    torch.testing.assert_close(scaled, plain / (0.05 * math.log(4) + 1))
    with pytest.raises(CheckpointError, match="yarn_log_multiplier"):
        config("llama", {**yarn, "rope.scaling.yarn_log_multiplier": 0.5})


def test_queries_that_grow_with_their_position_limit_the_context() -> None:
    keys = {"attention.temperature_scale": 0.1, "rope.scaling.original_context_length": 64}
    grown = config("mistral3", keys)
    assert grown["max_position_embeddings"] == 512 and grown["model_type"] == "ministral3"
    assert grown["rope_scaling"]["llama_4_scaling_beta"] == 0.1
    assert config("mistral3", {**keys, "attention.temperature_scale": 0.0})["max_position_embeddings"] == 512
    with pytest.raises(CheckpointError, match="temperature_scale"):
        config("llama", keys)


def test_factors_in_tensors_keep_what_stands_beside_them() -> None:
    divisors = np.array([1.0, 2.0, 3.0, 4.0], np.float32)
    both = {"rope_factors_short.weight": divisors, "rope_factors_long.weight": divisors * 2}
    keys = {"rope.scaling.attn_factor": 1.5, "rope.scaling.original_context_length": 20}
    found = config("phi3", keys, both)["rope_scaling"]
    assert (found["attention_factor"], found["long_factor"]) == (1.5, [2.0, 4.0, 6.0, 8.0])
    scaled = config("llama", {"rope.scaling.factor": 2.0}, {"rope_freqs.weight": divisors})
    torch.testing.assert_close(table(scaled), table(config("llama", {}, {"rope_freqs.weight": divisors * 2})))
    for arch, tensors in (("qwen2", {"rope_freqs.weight": divisors}), ("phi3", {"rope_factors_long.weight": divisors})):
        with pytest.raises(CheckpointError, match="rotary factors"):
            config(arch, {}, tensors)
    with pytest.raises(CheckpointError, match="yarn"):
        config("llama", {"rope.scaling.type": "yarn"}, {"rope_freqs.weight": divisors})


def test_which_layers_have_windows() -> None:
    def local(arch: str, **keys: Any) -> list[bool]:
        found = config(arch, {key.replace("__", "."): value for key, value in keys.items()})
        return [kind == "sliding_attention" for kind in found["layer_types"]]

    layers = {"block_count": 2}
    assert local("gemma2", **layers) == [True, False]
    assert config("gemma2", {})["sliding_window"] == 4096
    assert local("gemma3", **layers) == [False, False]
    window = {"attention__sliding_window": 30, **layers}
    for arch in ("gemma3", "cohere2", "exaone4"):
        assert local(arch, **window) == [True, True]
        assert local(arch, attention__sliding_window_pattern=2, **window) == [True, False]
        assert local(arch, attention__sliding_window_pattern=[False, True], **window) == [False, True]
    assert config("exaone4", {})["sliding_window"] is None
    more = {f"blk.{layer}.attn_norm.weight": np.ones(32, np.float32) for layer in range(64)}
    largest = config("exaone4", {"block_count": 64}, more)
    assert largest["sliding_window"] == 4096 and largest["layer_types"].count("full_attention") == 16
    with pytest.raises(CheckpointError, match="sliding_window is missing"):
        config("cohere2", {"attention.sliding_window": 0})
    assert config("gemma3", {"final_logit_softcapping": 7.0})["final_logit_softcapping"] == 7.0
    with pytest.raises(CheckpointError, match="sliding_window: 0"):
        config("gemma2", {"attention.sliding_window": 0})
    with pytest.raises(CheckpointError, match="sliding windows"):
        config("qwen2", {"attention.sliding_window": 30})


def test_what_llama4_files_leave_to_the_reader() -> None:
    plain = config("llama4", {})
    assert plain["use_qk_norm"] and "no_rope_layers" not in plain and "layer_types" not in plain
    assert not config("llama4", {"expert_count": 128})["use_qk_norm"]
    whole = config("llama4", {"attention.sliding_window": 0})
    assert set(whole["layer_types"]) == {"full_attention"} and all(whole["no_rope_layers"])
    with pytest.raises(CheckpointError, match=r"sliding_window is 64; supported: 0"):
        config("llama4", {"attention.sliding_window": 64})
    with pytest.raises(CheckpointError, match="expert_gating_func is 1"):
        config("llama4", {"expert_gating_func": 1})


def test_layers_that_draft_are_counted_with_the_others() -> None:
    found = config("glm4moe", {"nextn_predict_layers": 1})
    assert found["num_hidden_layers"] == config("glm4moe", {})["num_hidden_layers"] - 1
    with pytest.raises(CheckpointError, match="nextn_predict_layers is 2 of 2 layers"):
        config("glm4moe", {"nextn_predict_layers": 2})


def test_what_llama_cpp_needs_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    for arch in ("command-r", "cohere2"):
        for key, value in NEEDED[arch].items():
            monkeypatch.setitem(NEEDED, arch, {other: v for other, v in NEEDED[arch].items() if other != key})
            with pytest.raises(CheckpointError, match=key.rpartition(".")[2] if "epsilon" not in key else "epsilon"):
                config(arch, {})
            monkeypatch.setitem(NEEDED, arch, {**NEEDED[arch], key: value})


def test_only_models_are_models(tmp_path: Path) -> None:
    for key, value in (("general.type", "adapter"), ("split.count", 2), ("split.count", "x")):
        path = write_gguf(tmp_path / "m.gguf", metadata("llama") | {key: value}, weights())
        with pytest.raises(CheckpointError, match=r"not a model|parts of a model"):
            open_checkpoint(path)


CASES: list[dict[str, Any]] = [
    {},
    {"rope.scale_linear": 4.0},
    {"rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.8},
    {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
    {"rope.scaling.attn_factor": 1.3},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.2},
    {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.7},
    {"attention.temperature_scale": 0.3},
    {"final_logit_softcapping": 3.0},
    {"attn_logit_softcapping": 2.0},
    {"attention.sliding_window_pattern": 3},
    {"rope.freq_base_swa": 500.0},
    {"attention.scale": 0.5},
    {"logit_scale": 2.0},
    {"expert_gating_func": 2},
    {"rope.dimension_count": 16},
]
LLAMA4 = {
    "no_rope_layers": None, "moe_layers": None, "interleave_moe_layer_step": 2, "attention_chunk_size": 8192,
    "num_hidden_layers": 5, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip
"""What the format does not say."""
PROMPT = [23 * i % 300 + 5 for i in range(150)]
LLAMA_CPP = """
import json, sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = sys.argv[1], 1024, 1, 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
request = {"prompt": json.loads(sys.argv[2]), "n_predict": 1, "temperature": 0.0, "n_probs": 20}
print("RESULT" + json.dumps(xllamacpp.Server(params).handle_completions(request)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "qwen2-bias", "qwen3-qknorm", "qwen3-moe", "gemma", "gemma2",
                                    "gemma3-two-ropes", "phi3-half-rotated", "glm4-moe", "llama4"])  # fmt: skip
def test_logprobs_are_those_of_llama_cpp(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = parts.python("llama-cpp")
    made: dict[str, Any] = {}
    monkeypatch.setattr(test_gguf_families, "write_gguf", lambda path, keys, tensors: made.update(k=keys, t=tensors))
    usual = (
        {"query_pre_attn_scalar": 32, "sliding_window_pattern": 6} if family.startswith(("gemma2", "gemma3")) else {}
    )
    usual |= LLAMA4 if family == "llama4" else {}
    arch = test_gguf_families.ARCHITECTURES[family]
    test_gguf_families.convert(write_checkpoint(family, tmp_path / "folder", vocab_size=320, spread=0.5, **usual), arch)
    ran = 0
    for case in CASES:
        keys = made["k"] | vocabulary(320) | {f"{arch}.{key}": value for key, value in case.items()}
        path = write_gguf(tmp_path / "m.gguf", keys, made["t"])
        try:
            engine = make_engine(path, weights="dense")
        except PenstockError:
            continue
        theirs = llama_cpp(python, path)
        if theirs is None:
            continue
        ours = next(delta for delta in drain_one(engine) if delta.tokens).logprobs[0]
        found = dict(zip(ours.top_ids, ours.top_logprobs, strict=True))
        common = found.keys() & theirs.keys()
        assert len(common) > 14 and max(abs(found[i] - theirs[i]) for i in common) < 0.02, case
        ran += 1
    assert ran > (1 if family == "llama4" else 3)  # of which llama.cpp loads few of these files


def drain_one(engine: Any) -> Any:
    from penstock.engine.request import Request, SamplingParams

    engine.submit(Request("a", PROMPT, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20)))
    return drain(engine)


def llama_cpp(python: str, path: Path) -> dict[int, float] | None:
    """Its log-probabilities of the next token; None where it loads no such file."""
    command = [python, "-c", LLAMA_CPP, str(path), json.dumps(PROMPT)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    line = next((line for line in output.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        return None
    logprobs = json.loads(line.removeprefix("RESULT"))["choices"][0]["logprobs"]
    return {entry["id"]: entry["logprob"] for entry in logprobs["content"][0]["top_logprobs"]}


def vocabulary(size: int) -> dict[str, Any]:
    """Without tokens that are part of a character: llama.cpp says nothing of those."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(128))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, *(f"t{i}" for i in range(size - len(tokens)))],
        "tokenizer.ggml.scores": [-float(i) for i in range(size)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 128, *[1] * (size - len(tokens))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }


@pytest.mark.parametrize("value", [None, [0.5, 0.5, 0.5], "x", [1, 1], [0.5, math.inf]])
def test_numbers_of_activations_are_there_for_every_layer(value: Any, tmp_path: Path) -> None:
    """Of Apertus, whose files have them in the metadata."""
    numbers = {f"xielu.{name}": [0.5, 0.5] for name in ("alpha_p", "alpha_n", "beta", "eps")}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("apertus") | numbers, weights()))
    assert checkpoint.tensor("model.layers.1.mlp.act_fn.alpha_p").tolist() == [0.5]
    assert checkpoint.tensor("model.layers.1.mlp.act_fn.beta").shape == ()
    damaged = numbers | {"xielu.alpha_n": value} if value is not None else {}
    with pytest.raises(CheckpointError, match=r"xielu\.alpha_\w must be a number for each of 2 layers"):
        open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata("apertus") | damaged, weights()))
