"""Adapters that PEFT saves for A.X K2, Hunyuan 4 and other new families, among them HRM-Text, whose layers run several
times for each token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.request import Request
from tests import parts
from tests.engine.adapters.company import (
    TIGHT,
    assert_same_in_company,
    assert_same_in_deterministic_company,
    assert_same_on_ranks,
    one_by_one,
)
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

FAMILIES = ("axk2", "hy-v4", "hrm-text", "step3.5", "mistral-large4", "muse-glimmer", "muse-spark", "glm5-next")
WITHOUT_EXPERTS = ("hrm-text", "muse-glimmer")
SOME = [pytest.param(family, marks=() if family == "step3.5" else pytest.mark.slow) for family in FAMILIES]
"""In the quick suite one of them."""
GRIDS = {
    "axk2": (2, 2),
    "hy-v4": (2, 2),
    "hrm-text": (2, 1),
    "step3.5": (2, 3),
    "mistral-large4": (2, 2),
    "muse-glimmer": (2, 2),
    "muse-spark": (2, 2),
    "glm5-next": (2, 2),
}
EVERY: dict[str, list[str]] = {
    "axk2": ["q_a_proj", "q_gate_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj",
             "fc1", "fc2", "gate_proj", "up_proj", "down_proj"],
    "hy-v4": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj",
              "gate_proj", "up_proj", "down_proj"],
    "hrm-text": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "step3.5": ["q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "gate_proj", "up_proj", "down_proj"],
    "mistral-large4": ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "wq_b", "wk", "weights_proj",
                       "gate_proj", "up_proj", "down_proj"],
    "muse-glimmer": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "muse-spark": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "pre_expert_proj", "post_expert_proj"],
    "glm5-next": ["q_proj", "k_proj", "v_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj",
                  "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk", "weights_proj",
                  "gate_proj", "up_proj", "down_proj"],
}  # fmt: skip
"""Of each, all that PEFT calls a linear."""
NORMS = {
    "axk2": ["model.norm", "input_layernorm.norm", "0.post_attention_layernorm", "post_attention_layernorm.norm"],
    "hy-v4": ["model.norm", "input_layernorm", "post_attention_layernorm"],
    "mistral-large4": ["model.norm", "input_layernorm", "post_attention_layernorm"],
    "muse-glimmer": ["model.norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                     "post_feedforward_layernorm"],
    "muse-spark": ["model.norm", "input_layernorm", "pre_feedforward_layernorm"],
    "glm5-next": ["model.norm", "input_layernorm", "post_attention_layernorm"],
    "step3.5": ["model.norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"],
}  # fmt: skip
NOT_OF_LINEARS = ("k_norm.bias", "q_input_norm.bias", "softmax_scaling.bias", "dt_bias")
"""Biases that PEFT trains with all others."""
EXPERTS = ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
PREFIX: dict[str, Any] = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
OFT: dict[str, Any] = {"oft_block_size": 2, "init_weights": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("LoraConfig", LORA),
    "experts": ("LoraConfig", {**LORA, "target_parameters": EXPERTS}),
    "dora": ("LoraConfig", {**LORA, "use_dora": True, "bias": "all"}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down_proj"], "init_ia3_weights": False}),
    "oft": ("OFTConfig", OFT),
    "boft": ("BOFTConfig", {"boft_block_size": 2, "init_weights": False}),
    "loha": ("LoHaConfig", {"r": 3, "alpha": 6, "init_weights": False}),
    "miss": ("MissConfig", {"r": 2, "init_weights": False}),
    "norms": ("LoraConfig", LORA),
    "ends": ("LoraConfig", {**LORA, "target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
}  # fmt: skip
CASES = [
    pytest.param(
        family, kind, marks=() if kind == "lora" or (family, kind) == ("step3.5", "dora") else pytest.mark.slow
    )
    for family in FAMILIES
    for kind in KINDS
    if (family != "hrm-text" or kind != "norms") and (family not in WITHOUT_EXPERTS or kind != "experts")
]


QUICK = ("step3.5", "hrm-text")
CACHED = [pytest.param(family, marks=() if family in QUICK else pytest.mark.slow) for family in FAMILIES]
"""Prefixes: one with a window, and the one whose layers run several times."""


@pytest.fixture(scope="module", params=CACHED)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def trained(base: Path, folder: Path, family: str, kind: str, seed: int = 7) -> Reference:
    """The model with a random adapter, which is saved to `folder`."""
    peft = parts.library("peft")
    name, settings = KINDS[kind]
    reference = Reference(base)
    if kind == "ia3" and "down_proj" not in EVERY[family]:
        settings = {**settings, "feedforward_modules": ["post_expert_proj"]}
    saved = {"modules_to_save": NORMS[family]} if kind == "norms" else {}
    config = getattr(peft, name)(**{"target_modules": EVERY[family], **settings, **saved})
    theirs = peft.get_peft_model(reference.model, config)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if not parameter.requires_grad or name.endswith(NOT_OF_LINEARS):
                continue  # those are not linears', and stay
            if parameter.dim() == 1 or "ia3" in name:
                parameter.mul_(1 + 0.4 * torch.rand_like(parameter))
            else:
                parameter.normal_(0, 0.15)
    theirs.save_pretrained(folder)
    # A norm of the embedding stands before what PEFT adds, and behind what it merges.
    apart = kind == "ends" and family.startswith("muse")
    reference.model = theirs.eval() if apart else theirs.merge_and_unload().eval()
    return reference


def requests_of(names: list[str], count: int = 8) -> list[Request]:
    """Some of them without an adapter."""
    return [ask(f"r{i}", prompt, names[i % len(names)], 8) for i, prompt in enumerate(prompts(count, longest=90))]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_an_adapter_equals_merging_it(tmp_path: Path, family: str, kind: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    plain, merged = Reference(base), trained(base, tmp_path / "adapter", family, kind)
    specs = (AdapterSpec("tuned", str(tmp_path / "adapter")),)
    engine = make_engine(base, adapters=specs, token_budget=40, num_blocks=90)
    asked = {f"r{i}": (prompt, "tuned" if i % 2 else "") for i, prompt in enumerate(prompts(6, longest=90))}
    got = generate(engine, *(ask(id, prompt, adapter) for id, (prompt, adapter) in asked.items()))
    for id, (prompt, name) in asked.items():
        assert (merged if name else plain).agrees(prompt, got[id], TIE), id
    assert any(not plain.agrees(prompt, got[id], TIE) for id, (prompt, name) in asked.items() if name)
    assert_idle(engine)


@pytest.mark.parametrize("family", SOME)
def test_in_company_and_deterministic(tmp_path: Path, family: str) -> None:
    """Several adapters and the base in one batch, chunks, preemption, a slot too few, n-grams."""
    base = write_checkpoint(family, tmp_path / "base")
    names = {"lora": "lora", "dora": "dora", "more": "lora" if family in WITHOUT_EXPERTS else "experts"}
    for seed, (name, kind) in enumerate(names.items()):
        trained(base, tmp_path / name, family, kind, seed)
    specs = tuple(AdapterSpec(name, str(tmp_path / name)) for name in names)
    every = ["", *names]
    alone = one_by_one(make_engine(base, adapters=specs), requests_of(every))
    assert_same_in_company(base, specs, requests_of(every), alone, {**TIGHT, "num_blocks": 34})
    assert_same_in_deterministic_company(base, specs, lambda: requests_of(every))


@pytest.mark.parametrize(
    "kind",
    [
        "lora",
        pytest.param("dora", marks=pytest.mark.slow),
        pytest.param("oft", marks=pytest.mark.slow),
        pytest.param("ends", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("family", SOME)
def test_ranks_give_the_same(tmp_path: Path, family: str, kind: str) -> None:
    base, grid = write_checkpoint(family, tmp_path / "base"), GRIDS[family]
    kind = "experts" if kind == "lora" and family not in WITHOUT_EXPERTS else kind
    trained(base, tmp_path / "tuned", family, kind)
    specs = (AdapterSpec("tuned", str(tmp_path / "tuned")),)
    alone = one_by_one(make_engine(base, adapters=specs), requests_of(["", "tuned"], 6))
    assert_same_on_ranks(base, specs, requests_of(["", "tuned"], 6), alone, grid)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"attention_parallel": "data"}, {}], ids=str)
@pytest.mark.parametrize("family", ["axk2", "hy-v4", "mistral-large4", "muse-spark", "glm5-next"])
def test_ranks_that_share_otherwise_give_the_same(tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    trained(base, tmp_path / "tuned", family, "experts")
    specs = (AdapterSpec("tuned", str(tmp_path / "tuned")),)
    alone = one_by_one(make_engine(base, adapters=specs), requests_of(["", "tuned"], 6))
    with threaded_engine(base, 2, 1, adapters=specs, token_budget=40, expert_parallel=True, **settings) as ranks:
        assert generate(ranks, *requests_of(["", "tuned"], 6)) == alone


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", SOME)
def test_on_quantized_weights(tmp_path: Path, family: str, weights: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    trained(base, tmp_path / "tuned", family, "lora")
    trained(base, tmp_path / "zero", family, "lora")
    file = tmp_path / "zero/adapter_model.safetensors"
    save_file({key: torch.zeros_like(value) for key, value in load_file(file).items()}, file)
    specs = (AdapterSpec("tuned", str(tmp_path / "tuned")), AdapterSpec("zero", str(tmp_path / "zero")))
    engine = make_engine(base, adapters=specs, weights=weights, activations="int16")
    prompt = prompts(1)[0]
    got = generate(engine, ask("base", prompt), ask("zero", prompt, "zero"), ask("tuned", prompt, "tuned"))
    assert got["zero"] == got["base"] != got["tuned"]


def test_cached_prefixes_are_those_of_an_adapter(base: tuple[str, Path], tmp_path: Path) -> None:
    family, folder = base
    merged = trained(folder, tmp_path / "tuned", family, "lora")
    engine = make_engine(folder, adapters=(AdapterSpec("tuned", str(tmp_path / "tuned")),))
    prompt, hits = prompts(1, longest=60)[0] * 3, []
    for number, adapter in enumerate(("", "tuned", "tuned")):
        before = engine.load_snapshot().prefix_hit_tokens
        got = generate(engine, ask(f"r{number}", prompt, adapter))[f"r{number}"]
        hits.append(engine.load_snapshot().prefix_hit_tokens - before)
    assert hits[:2] == [0, 0] and hits[2] > 0
    assert merged.agrees(prompt, got, TIE)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(
            pytest.param(family, "PromptTuningConfig", marks=() if family == "hrm-text" else pytest.mark.slow)
            for family in FAMILIES
        ),
        ("hrm-text", "PrefixTuningConfig"),
    ],
)
def test_virtual_tokens(tmp_path: Path, family: str, kind: str) -> None:
    """Of prefix tuning each run of a layer has keys and values of its own."""
    peft = parts.library("peft")
    # PEFT makes keys for as many heads as that says. (Those of Step 3.5's layers with a window are no multiple of it.)
    heads = {} if family == "step3.5" else {"num_key_value_heads": 4}
    base = write_checkpoint(family, tmp_path / "base", **heads)
    theirs = peft.get_peft_model(
        Reference(base).model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=5)
    ).eval()
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "prompt_encoder" in name:
                parameter.normal_(0, 1)
    theirs.save_pretrained(tmp_path / "tuned")
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(tmp_path / "tuned")),), token_budget=16)
    for prompt in prompts(3, longest=60):
        got = generate(engine, ask("x", prompt, "tuned", 8))["x"]
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + got[:-1]])).logits[0, -len(got) :]
        margins = logits.amax(-1) - logits.gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)
        assert float(margins.max()) <= TIE
        assert not Reference(base).agrees(prompt, got, TIE)
    assert_idle(engine)


def test_layers_that_are_named_are_those_of_both_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_checkpoint("hrm-text", tmp_path / "base")
    monkeypatch.setitem(KINDS, "some", ("LoraConfig", {**LORA, "layers_to_transform": [1]}))
    merged = trained(base, tmp_path / "tuned", "hrm-text", "some")
    stored = load_file(tmp_path / "tuned/adapter_model.safetensors")
    assert {key.split("layers.")[0] for key in stored} == {f"base_model.model.model.{one}_module." for one in "LH"}
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(tmp_path / "tuned")),))
    prompt = prompts(1)[0]
    got = generate(engine, ask("x", prompt, "tuned"))["x"]
    assert merged.agrees(prompt, got, TIE) and not Reference(base).agrees(prompt, got, TIE)


@pytest.mark.parametrize(
    ("family", "old", "new", "message"),
    [
        ("hrm-text", "H_module.layers.0.", "layers.0.", "beyond the model's 4 layers, which are below L_module and H"),
        ("hrm-text", "H_module.layers.1.", "H_module.layers.2.", "beyond the model's 4 layers"),
        ("axk2", "layers.1.mlp.gate.lora", "layers.1.mlp.gates.lora", "cannot apply .*mlp.gates"),
        ("axk2", "layers.1.post_attention_layernorm.", "layers.0.post_attention_layernorm.", "does not have"),
        ("hy-v4", "layers.0.self_attn.indexer.", "layers.1.self_attn.indexer.", "does not have"),
    ],
)
def test_modules_that_a_model_does_not_have(tmp_path: Path, family: str, old: str, new: str, message: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    trained(base, tmp_path / "tuned", family, "lora" if family == "hrm-text" else "experts")
    file = tmp_path / "tuned/adapter_model.safetensors"
    stored = load_file(file)
    assert any(old in key for key in stored)
    save_file({key.replace(old, new): value for key, value in stored.items()}, file)
    assert re.search(message, refusal(base, tmp_path / "tuned"))


@pytest.mark.parametrize(
    ("family", "name", "settings", "message"),
    [
        ("axk2", "PrefixTuningConfig", PREFIX, "prefix tuning needs a model"),
        ("hy-v4", "PrefixTuningConfig", PREFIX, "prefix tuning needs a model"),
        ("mistral-large4", "PrefixTuningConfig", PREFIX, "prefix tuning needs a model"),
        ("glm5-next", "PrefixTuningConfig", PREFIX, "prefix tuning needs a model"),
        (
            "glm5-next",
            "LoraConfig",
            {**LORA, "target_parameters": ["index_kpool_compress_gate"]},
            "cannot apply .*indexer",
        ),
        ("glm5-next", "LoraConfig", {**LORA, "modules_to_save": ["o_norm"]}, "cannot apply .*o_norm"),
        ("mistral-large4", "LoraConfig", {**LORA, "modules_to_save": ["kv_a_layernorm"]}, "cannot apply .*kv_a_lay"),
        (
            "muse-spark",
            "LoraConfig",
            {**LORA, "modules_to_save": ["post_feedforward_layernorm"]},
            "cannot apply .*post_f",
        ),
        ("muse-glimmer", "LoraConfig", {**LORA, "trainable_token_indices": [1, 2]}, "leaves out the norm"),
        ("hy-v4", "LoraConfig", {**LORA, "target_parameters": ["attn_hc.fn"]}, "cannot apply .*attn_hc"),
        ("axk2", "LoraConfig", {**LORA, "modules_to_save": ["input_layernorm"]}, "cannot apply .*input_layernorm.*fc1"),
        ("axk2", "LoraConfig", {**LORA, "modules_to_save": ["q_a_layernorm"]}, "cannot apply .*q_a_layernorm"),
    ],
)
def test_what_cannot_be_applied_is_refused(
    tmp_path: Path, family: str, name: str, settings: dict[str, Any], message: str
) -> None:
    peft = parts.library("peft")
    base = write_checkpoint(family, tmp_path / "base")
    targets = {"target_modules": ["o_proj"]} if name == "LoraConfig" else {}
    theirs = peft.get_peft_model(Reference(base).model, getattr(peft, name)(**settings, **targets))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    theirs.save_pretrained(tmp_path / "tuned")
    assert re.search(message, refusal(base, tmp_path / "tuned"))


def test_a_gate_that_was_saved_beside_its_norm_may_be_the_models_own(tmp_path: Path) -> None:
    peft = parts.library("peft")
    base = write_checkpoint("axk2", tmp_path / "base")
    reference = Reference(base)
    config = peft.LoraConfig(**LORA, target_modules=["o_proj"], modules_to_save=["input_layernorm"])
    theirs = peft.get_peft_model(reference.model, config)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.requires_grad and name.endswith("norm.weight"):
                parameter.mul_(1 + 0.4 * torch.rand_like(parameter))
    theirs.save_pretrained(tmp_path / "tuned")
    reference.model = theirs.merge_and_unload().eval()
    prompt = prompts(1)[0]
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(tmp_path / "tuned")),))
    assert reference.agrees(prompt, generate(engine, ask("x", prompt, "tuned"))["x"], TIE)


def refusal(base: Path, adapter: Path) -> str:
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),))
    engine.submit(ask("x", [1, 2, 3], "tuned"))
    return str(drain(engine)[-1].error)
