"""The text decoder of a model that also takes images: its tokens are those of the reference for text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.models.families import FAMILIES, TEXT_TYPES, WRAPPERS, decoder_type, read_config
from penstock.engine.models.wrappers import senses
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError
from tests.engine.adapters.files import merge, write_adapter
from tests.engine.foreign import write_foreign
from tests.engine.harness import drain, generate, greedy, make_engine
from tests.engine.multimodal import CHECKPOINTS, THROUGH_LIBRARY, saved, tiny_model, write_as_named
from tests.engine.parallel.threads import threaded_engine
from tests.engine.quantization import layouts
from tests.engine.tiny import COMMON, Reference, write_checkpoint

PROMPT = [29 * i % 199 for i in range(70)]
QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "cohere2_vision", "hunyuan_vl")


def check(folder: Path, model: Any, tolerance: float = 2e-3) -> None:
    """Greedy tokens and their log-probabilities are the model's: those show scales and caps of logits too."""
    engine = make_engine(folder)
    engine.submit(greedy("a", PROMPT, 12, logprobs=0))
    deltas = drain(engine)
    tokens = [token for delta in deltas for token in delta.tokens]
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0, len(PROMPT) - 1 :]
    assert logits.argmax(-1).tolist() == tokens
    expected = logits.log_softmax(-1).amax(-1)
    found = torch.tensor([entry.logprob for delta in deltas for entry in delta.logprobs or ()])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in CHECKPOINTS
        if name != "qianfan_ocr"
    ],
)
def test_as_published(name: str, tmp_path: Path) -> None:
    check(tmp_path, saved(name, tmp_path))


def _older_llava(name: str) -> str:
    return "language_model." + name.replace("model.language_model.", "model.") if _of_decoder(name) else name


def _older_qwen(name: str) -> str:
    return name.replace("model.language_model.", "model.") if _of_decoder(name) else name.removeprefix("model.")


def _thinker(name: str) -> str:
    return f"thinker.{_older_qwen(name)}"


def _of_decoder(name: str) -> bool:
    return name.startswith(("model.language_model.", "lm_head."))


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("qianfan_ocr", _older_llava),  # which the reference reads, but does not write
        ("qwen2_vl", str),
        ("qwen2_vl", _older_qwen),
        pytest.param("qwen3_vl_moe", str, marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni", str, marks=pytest.mark.slow),
        pytest.param("qwen2_5_omni", _thinker, marks=pytest.mark.slow),
        pytest.param("glm4v", _older_llava, marks=pytest.mark.slow),
        ("llava", str),
        ("llava", _older_llava),
        pytest.param("idefics3", str, marks=pytest.mark.slow),
        pytest.param("internvl", _older_llava, marks=pytest.mark.slow),
        pytest.param("paddleocr_vl", str, marks=pytest.mark.slow),
        pytest.param("hunyuan_vl", str, marks=pytest.mark.slow),
        pytest.param("minimax_m3_vl", str, marks=pytest.mark.slow),
        pytest.param("mistral_large4", str, marks=pytest.mark.slow),
        pytest.param("glm5_next", str, marks=pytest.mark.slow),
    ],
)
def test_other_layouts_of_tensors(name: str, rename: Callable[[str], str], tmp_path: Path) -> None:
    model = tiny_model(name)
    check(write_as_named(model, tmp_path, rename), model)


def _moved(source: Path, folder: Path, config: dict[str, Any], prefix: Callable[[str], str] = str) -> Path:
    """A checkpoint's tensors beside another configuration, and under other names."""
    folder.mkdir()
    tensors = load_file(source / "model.safetensors")
    save_file({prefix(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("inner", ["deepseek_v3", "kimi_k2"])
def test_kimi_k25(inner: str, tmp_path: Path) -> None:
    """Its text part is DeepSeek V3 under other names. (The reference writes none of the names that it reads.)"""
    text = write_checkpoint("deepseek-v3", tmp_path / "text")
    config = {"model_type": "kimi_k25", "text_config": {**_config(text), "model_type": inner}}
    config |= {"vision_config": {"hidden_size": 32}, "media_placeholder_token_id": 198}
    folder = _moved(text, tmp_path / "whole", config, lambda name: f"language_model.{name}")
    got = generate(make_engine(folder), greedy("a", PROMPT, 12))["a"]
    assert Reference(text).agrees(PROMPT, got)


def test_perception_lm(tmp_path: Path) -> None:
    """By hand: the reference's vision part needs another library. Ties are the decoder's where the wrapper has none."""
    text = write_checkpoint("llama-mqa-tied", tmp_path / "text")
    config = {
        "model_type": "perception_lm",
        "text_config": _config(text),
        "vision_config": {"model_type": "timm_wrapper"},
    }
    folder = _moved(text, tmp_path / "whole", config, lambda name: name.replace("model.", "model.language_model.", 1))
    got = generate(make_engine(folder), greedy("a", PROMPT, 12))["a"]
    assert Reference(text).agrees(PROMPT, got)


@pytest.mark.slow
def test_gemma3n(tmp_path: Path) -> None:
    """By hand: the reference's vision part needs another library, which the decoder alone does not."""
    text = write_foreign("gemma3n_text", tmp_path / "text")
    config = {"model_type": "gemma3n", "text_config": _config(text)}
    folder = _moved(text, tmp_path / "whole", config, lambda name: name.replace("model.", "model.language_model.", 1))
    engine = make_engine(folder)
    assert engine.info.runs_through == "transformers"
    assert Reference(text).agrees(PROMPT, generate(engine, greedy("a", PROMPT, 12))["a"])


def test_what_neither_we_nor_the_library_can_run_is_refused() -> None:
    with pytest.raises(CheckpointError, match="internvl model around a molmo2_text decoder"):
        read_config({"model_type": "internvl", "text_config": {"model_type": "molmo2_text"}})


@pytest.mark.slow
@pytest.mark.parametrize("name", THROUGH_LIBRARY)
def test_of_a_library_model_the_decoder_alone_is_read(name: str, tmp_path: Path) -> None:
    """Its vision part takes no memory, and layers of it are not taken for the decoder's."""
    saved(name, tmp_path)
    engine = make_engine(tmp_path)
    assert engine.info.runs_through == "transformers"
    linears = [linear.name for linear in engine.runner.decoder.linears]  # type: ignore[attr-defined]
    assert linears and not any(map(senses, linears))


def test_the_thinker_of_an_omni_model(tmp_path: Path) -> None:
    """Two levels down, beside a talker with an embedding and layers of its own."""
    model = saved("qwen3_omni_moe", tmp_path / "thinker")
    thinker = _config(tmp_path / "thinker")
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": thinker,
        "talker_config": {"text_config": {"hidden_size": 8}},
    }
    folder = _moved(tmp_path / "thinker", tmp_path / "whole", config, lambda name: f"thinker.{name}")
    tensors = load_file(folder / "model.safetensors")
    talker = {"talker.model.embed_tokens.weight": torch.zeros(5, 8), "talker.lm_head.weight": torch.zeros(5, 8)}
    save_file({**talker, **tensors}, folder / "model.safetensors")
    check(folder, model)


def test_keys_of_an_older_file_stand_beside_those_of_the_wrapper(tmp_path: Path) -> None:
    model = saved("qwen2_vl", tmp_path / "new")
    config = _config(tmp_path / "new")
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    older = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    del text["model_type"], text["layer_types"]
    folder = _moved(tmp_path / "new", tmp_path / "old", {**text, **config, **older})
    check(folder, model)
    assert transformers.AutoConfig.from_pretrained(folder).text_config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize(
    "name",
    [
        name if name == "qwen2_5_vl" else pytest.param(name, marks=pytest.mark.slow)
        for name in ("qwen2_5_vl", "qwen3_vl", "glm4v", "gemma3", "llava", "ernie4_5_vl_moe", "qwen2_5_omni")
    ],
)
def test_tokens_that_stand_for_images_are_tokens_like_others(name: str, tmp_path: Path) -> None:
    """Without pixels the reference embeds them like the others, and their positions are those of text."""
    model = tiny_model(name)
    marks = [key for key in model.config.to_dict() if key.endswith(("_token_id", "_token_index"))]
    for place, key in enumerate(marks):
        setattr(model.config, key, 180 + place)
    model.save_pretrained(tmp_path)
    prompt = [*PROMPT[:20], 180, 181, *PROMPT[20:30], *(180 + place for place in range(len(marks))), *PROMPT[30:40]]
    got = generate(make_engine(tmp_path), greedy("a", prompt, 8))["a"]
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + got[:-1]])).logits[0, len(prompt) - 1 :]
    assert logits.argmax(-1).tolist() == got


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen2_5_vl", "gptq"),
        pytest.param("qwen2_5_vl", "fp8", marks=pytest.mark.slow),
        pytest.param("llava-diffllama", "gptq", marks=pytest.mark.slow),
    ],
)
def test_weights_in_few_bits(name: str, layout: str, tmp_path: Path) -> None:
    """Matrices of the decoder alone are in few bits; what sees is left as it is."""
    model = saved(name, tmp_path / "base")

    def of_decoder(name: str) -> bool:
        return layouts.is_linear(name) and not senses(name)

    few, same, _ = layouts.write(tmp_path / "base", layout, tmp_path, is_linear=of_decoder)
    check(few, type(model).from_pretrained(same).eval(), tolerance=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "pipeline"),
    [
        ("qwen3_vl", 2, 2),
        ("glm4v_moe", 2, 1),
        ("qwen2_5_omni", 1, 2),
        ("gemma4", 2, 1),
        ("llava-diffllama", 2, 1),
    ],
)
def test_several_ranks_give_the_tokens_of_one(name: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    """Layers of what sees are numbered as well; the head may be the embedding, under a name of several."""
    saved(name, tmp_path)
    expected = generate(make_engine(tmp_path), greedy("a", PROMPT, 12))
    with threaded_engine(tmp_path, tensor, pipeline) as engine:
        assert generate(engine, greedy("a", PROMPT, 12)) == expected


def test_an_adapter_equals_merging_it(tmp_path: Path) -> None:
    """Its file names modules as the base checkpoint does. It also changes layers that see, which are numbered too."""
    base = write_as_named(tiny_model("llava"), tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base, targets=("q_proj", "v_proj", "down_proj"))
    merged = merge(base, adapter, tmp_path / "merged")
    expected = generate(make_engine(merged), greedy("a", PROMPT, 12))
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),))
    request = Request("a", PROMPT, SamplingParams(max_tokens=12, temperature=0.0), adapter="tuned")
    assert generate(engine, request) == expected


@pytest.mark.parametrize("kind", sorted(WRAPPERS))
def test_wrappers_are_what_the_reference_says(kind: str) -> None:
    """Whose keys the decoder's are where a file does not say, and which class reads them."""
    wrapper, cls = WRAPPERS[kind], transformers.CONFIG_MAPPING[kind]
    spec = cls.sub_configs_defaults[wrapper.key]
    assert spec.model_type == wrapper.decoder
    assert wrapper.fixed == (spec.config_class is not transformers.AutoConfig)
    assert wrapper.decoder in {**FAMILIES, **TEXT_TYPES, **WRAPPERS, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    if wrapper.flat:
        text = cls(hidden_size=48, vision_config={}).text_config
        assert text.hidden_size == 48


def _wrapped(kind: str, text: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"model_type": kind, "text_config": {**COMMON, **text}, **beside}


@pytest.mark.parametrize("family", ["cohere2", "gemma2", "granite", "falcon_h1"])
def test_a_wrappers_head_neither_scales_nor_caps_logits(family: str) -> None:
    scaled = {"logit_scale": 0.25, "logits_scaling": 4.0, "final_logit_softcapping": 30.0, "lm_head_multiplier": 0.5}
    own = {key: value for key, value in scaled.items() if key in FAMILIES[family].reads}
    text = {**own, "model_type": family, "mamba_n_heads": 128, "mamba_d_ssm": 128 * 64}
    alone, inside = read_config({**COMMON, **text}), read_config(_wrapped("llava", text))
    assert (alone.logit_scale, alone.logit_softcap) != (1.0, None)
    assert (inside.logit_scale, inside.logit_softcap) == (1.0, None)


@pytest.mark.parametrize(
    ("kind", "of_wrapper", "of_text"),
    [
        (kind, wrapper, text)
        for kind in ("llava", "internvl", "qwen2_vl", "llava_next", "lfm2_vl", "perception_lm")
        for wrapper in (None, False, True)
        for text in (None, False, True)
    ],
)
def test_heads_are_tied_where_the_reference_ties_them(kind: str, of_wrapper: bool | None, of_text: bool | None) -> None:
    text: dict[str, Any] = {} if of_text is None else {"tie_word_embeddings": of_text}
    beside = {} if of_wrapper is None else {"tie_word_embeddings": of_wrapper}
    raw = _wrapped(kind, text, **beside)
    expected = transformers.CONFIG_MAPPING[kind].from_dict(json.loads(json.dumps(raw))).tie_word_embeddings
    assert read_config(raw).tied_embeddings == expected


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (_wrapped("paligemma", {"model_type": "gemma"}), "both directions"),
        ({"model_type": "llava"}, "must have text_config"),
        (_wrapped("qwen2_5_vl", {"hidden_act": "relu"}), "hidden_act is 'relu'"),
        (_wrapped("qwen3_vl", {"sliding_window": 64}), "sliding_window is 64"),
        (_wrapped("glm4v", {"head_dim": 8}), "head_dim is 8"),
        (_wrapped("hunyuan_vl", {}), "mrope_section"),
        (_wrapped("ernie4_5_vl_moe", {"mlp_layer_types": ["sparse", "dense", "sparse"]}), "mlp_layer_types"),
        (_wrapped("ernie4_5_vl_moe", {"rope_parameters": {"mrope_section": [2, 3, 3]}}), "mrope_section"),
        (_wrapped("llava", {"is_causal": False, "model_type": "llama"}), "is_causal is False"),
    ],
)
def test_what_cannot_be_run_exactly_is_refused(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_config(raw)


def test_decoders_are_named_where_the_reference_looks() -> None:
    """A class of its own reads the keys whatever they are called; another is chosen by the name."""
    assert decoder_type(_wrapped("qwen3_vl", {"model_type": "anything"})) == "qwen3_vl_text"
    assert decoder_type(_wrapped("internvl", {"model_type": "gpt_oss"})) == "gpt_oss"
    assert decoder_type(_wrapped("exaone4_5", {"model_type": "exaone4_5_text"})) == "exaone4"
    assert decoder_type({"model_type": "qwen2_5_omni", "thinker_config": _wrapped("x", {})}) == "qwen2_5_omni_text"
