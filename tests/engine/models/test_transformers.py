"""Model types that no family describes run through `transformers`, and give the tokens that it gives alone."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.models.families import FAMILIES
from penstock.engine.models.transformers.linears import ModuleWeights
from penstock.engine.request import Request, SamplingParams
from penstock.engine.speculative.ngram import NgramProposer
from penstock.errors import CheckpointError
from tests.engine.adapters.kind_files import merged as merge_kind
from tests.engine.adapters.kind_files import write_kind
from tests.engine.foreign import FOREIGN, without_families, write_foreign
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.tiny import Reference, write_checkpoint

LENGTHS = (1, 15, 16, 17, 130, 330)
OUTPUT = 12
QUICK = ("starcoder2",)
WITHOUT_FAMILY = [name for name in FOREIGN if name.partition("-")[0] not in FAMILIES]
assert len(WITHOUT_FAMILY) >= 8, "families took the others over; add types that have none"


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, 199) for _ in range(length)]


@pytest.mark.parametrize(
    "model_type",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in WITHOUT_FAMILY if name not in QUICK)],
)
def test_tokens_equal_the_library_alone_in_a_mixed_batch_and_preempted(model_type: str, tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    rng = random.Random(7)
    reference = Reference(folder)
    prompts = {f"r{n}": prompt_of(rng, n) for n in LENGTHS}
    alone = make_engine(folder, token_budget=1024, prefix_cache=False)
    assert alone.info.runs_through == "transformers"
    expected: dict[str, list[int]] = {}
    for name, prompt in prompts.items():
        expected |= generate(alone, greedy(name, prompt, OUTPUT))
        assert len(expected[name]) == OUTPUT and reference.agrees(prompt, expected[name]), name

    mixed = make_engine(folder, token_budget=48, num_blocks=44, max_running=6)
    requests = [
        greedy(f"{again}{name}", prompt, OUTPUT) for name, prompt in prompts.items() for again in ("", "again-")
    ]
    rng.shuffle(requests)
    got = generate(mixed, *requests)
    for name, tokens in expected.items():
        assert got[name] == got[f"again-{name}"] == tokens, name
    assert mixed.load_snapshot().prefix_hit_tokens > 0
    assert_idle(mixed)

    growing = {f"grow-{i}": prompt_of(rng, 5 + 20 * i) for i in range(5)}
    room = 18 if alone.scheduler.allocator.window is None else 11
    tight = make_engine(folder, token_budget=48, num_blocks=room, max_running=6)
    got = generate(tight, *(greedy(name, prompt, 40) for name, prompt in growing.items()))
    for name, prompt in growing.items():
        assert len(got[name]) == 40 and reference.agrees(prompt, got[name])
    assert tight.load_snapshot().preemptions > 0
    assert_idle(tight)


@pytest.mark.parametrize("model_type", ["bloom", pytest.param("starcoder2", marks=pytest.mark.slow)])
def test_a_prefix_may_be_computed_in_the_same_step(model_type: str, tmp_path: Path) -> None:
    """One token behind a shared block counts as a decode, and those are packed before the prompt that has the block."""
    folder = write_foreign(model_type, tmp_path)
    reference, prompt = Reference(folder), prompt_of(random.Random(7), 17)
    others = [prompt_of(random.Random(n), 40) for n in (1, 2)]
    engine = make_engine(folder, token_budget=256)
    same = [greedy(f"r{n}", prompt, 6) for n in range(4)]
    got = generate(engine, *same, *(greedy(f"o{n}", prompt[:16] + other, 6) for n, other in enumerate(others)))
    assert engine.load_snapshot().prefix_hit_tokens >= 3 * 16
    assert all(reference.agrees(prompt, got[f"r{n}"]) for n in range(4))
    assert all(reference.agrees(prompt[:16] + other, got[f"o{n}"]) for n, other in enumerate(others))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gpt2", "starcoder2", "bloom", "nemotron"])
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_few_bit_caches_stay_close(model_type: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    reference = Reference(folder)
    prompt = prompt_of(random.Random(3), 60)
    engine = make_engine(folder, kv_dtype=kv_dtype)
    tokens = generate(engine, greedy("r", prompt, 1))["r"]
    assert float(reference.margins(prompt, tokens).max()) < 3.0


def test_without_a_drafter_of_their_own_auto_means_ngrams(tmp_path: Path) -> None:
    engine = make_engine(write_foreign("gpt2", tmp_path), speculation="auto")
    assert engine.speculation is not None and isinstance(engine.speculation.proposer, NgramProposer)


def test_speculation_and_the_host_tier(tmp_path: Path) -> None:
    folder = write_foreign("gpt2", tmp_path)
    prompt = prompt_of(random.Random(5), 20) * 4
    plain = generate(make_engine(folder), greedy("r", prompt, 40))["r"]
    drafted = make_engine(folder, speculation="ngram", host_memory=1 << 20, num_blocks=24)
    assert generate(drafted, greedy("r", prompt, 40))["r"] == plain
    others = [greedy(f"o{i}", prompt_of(random.Random(i), 300), 4) for i in range(4)]
    generate(drafted, *others)
    assert generate(drafted, greedy("r2", prompt, 40))["r2"] == plain
    assert_idle(drafted)


def changed(folder: Path, **keys: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | keys))
    return folder


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"model_type": "t5"}, "encoder|generates text"),
        ({"model_type": "no-such-type"}, "neither one of ours .* nor"),
        ({"model_type": "mamba"}, "it is incomplete"),
        ({"model_type": "qwen3_next_like", "auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "trust_remote_code"),
    ],
)
def test_other_models_are_refused(keys: dict[str, Any], reason: str, tmp_path: Path) -> None:
    folder = changed(write_checkpoint("llama-gqa", tmp_path), **keys)
    with pytest.raises(CheckpointError, match=reason):
        make_engine(folder)


def test_a_missing_tensor_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_foreign("starcoder2", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.c_fc.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.c_fc"):
        make_engine(folder)


def test_without_the_library_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = changed(write_checkpoint("llama-gqa", tmp_path), model_type="gpt2")
    monkeypatch.setattr("penstock.engine.models.transformers.config.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install 'penstock\[transformers\]'"):
        make_engine(folder)


def write_lora(
    folder: Path, base: Path, targets: Sequence[str], *, transposed: bool = False, dora: bool = False
) -> tuple[Path, Path]:
    """A random adapter, and the checkpoint with it merged in. `transposed`: matrices are stored [inputs, outputs]."""
    from safetensors.torch import load_file, save_file

    weights, tensors, rank = load_file(base / "model.safetensors"), {}, 4
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.endswith(tuple(targets)) and name.endswith(".weight"):
            outputs, inputs = reversed(weight.shape) if transposed else weight.shape
            a, b = (torch.randn(*shape, generator=generator) * 0.2 for shape in ((rank, inputs), (outputs, rank)))
            prefix = f"base_model.model.{module}"
            tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
            weights[name] = weight + 2 * ((b @ a).t() if transposed else b @ a)
            if dora:
                magnitude = torch.rand(outputs, generator=generator) + 0.5
                lengths = weights[name].norm(dim=0 if transposed else 1)
                tensors[f"{prefix}.lora_magnitude_vector"] = magnitude * lengths
                weights[name] = weights[name] * (magnitude if transposed else magnitude.unsqueeze(1))
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": list(targets), "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"fan_in_fan_out": transposed, "use_dora": dora}))
    shutil.copytree(base, merged)
    save_file(weights, merged / "model.safetensors", {"format": "pt"})
    return adapter, merged


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "targets", "settings"),
    [
        ("starcoder2", ("q_proj", "v_proj", "c_fc"), {}),
        ("starcoder2", ("q_proj", "v_proj", "c_fc"), {"dora": True}),
        ("bloom", ("query_key_value", "dense_4h_to_h"), {}),
        ("gpt2", ("c_attn", "mlp.c_proj"), {"transposed": True}),
        ("gpt2", ("c_attn", "mlp.c_proj"), {"transposed": True, "dora": True}),
        ("phimoe", ("q_proj", "o_proj"), {}),
    ],
)
def test_an_adapter_equals_merging_it(
    model_type: str, targets: tuple[str, ...], settings: dict[str, bool], tmp_path: Path
) -> None:
    base = write_foreign(model_type, tmp_path / "base")
    adapter, folder = write_lora(tmp_path, base, targets, **settings)
    merged, plain = Reference(folder), Reference(base)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=40, num_blocks=60)
    rng = random.Random(2)
    asked = {f"r{i}": (prompt_of(rng, 9 + 13 * i), "tuned" if i % 2 else "") for i in range(6)}
    requests = [
        Request(name, prompt, SamplingParams(max_tokens=10, temperature=0.0), adapter=chosen)
        for name, (prompt, chosen) in asked.items()
    ]
    got = generate(engine, *requests)
    for name, (prompt, chosen) in asked.items():
        assert (merged if chosen else plain).agrees(prompt, got[name], 2e-2), name
    assert not all(plain.agrees(prompt, got[name], 2e-2) for name, (prompt, _) in asked.items())
    assert_idle(engine)


@pytest.mark.slow
def test_adapters_of_other_kinds_equal_merging_them(tmp_path: Path) -> None:
    """Also those that change the inputs of linears."""
    base = write_foreign("starcoder2", tmp_path / "base")
    names, targets = ("loha", "oft", "ia3-inputs", "beft"), ("q_proj", "v_proj", "c_fc")
    folders = {name: write_kind(tmp_path / name, base, name, targets=targets) for name in names}
    specs = tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items())
    engine, plain = make_engine(base, adapters=specs, token_budget=64, num_blocks=60), Reference(base)
    rng = random.Random(3)
    prompts = {name: prompt_of(rng, 21 + 7 * i) for i, name in enumerate(("", *names))}
    params = SamplingParams(max_tokens=10, temperature=0.0)
    got = generate(engine, *(Request(f"r {name}", prompt, params, adapter=name) for name, prompt in prompts.items()))
    for name, prompt in prompts.items():
        reference = Reference(merge_kind(base, folders[name], tmp_path / f"{name} merged")) if name else plain
        assert reference.agrees(prompt, got[f"r {name}"], 2e-2), name
    assert_idle(engine)


@pytest.mark.slow
def test_an_adapter_stays_with_its_sequence(tmp_path: Path) -> None:
    """Sequences that run one after the other: the adapter of the first tokens of a step is not added to others'."""
    base = write_foreign("bloom", tmp_path / "base")
    adapter, folder = write_lora(tmp_path, base, ("query_key_value", "dense_h_to_4h"))
    merged, plain = Reference(folder), Reference(base)
    engine = make_engine(base, adapters=(AdapterSpec("tuned", str(adapter)),), token_budget=256)
    short, long = prompt_of(random.Random(1), 6), prompt_of(random.Random(2), 40)
    params = SamplingParams(max_tokens=8, temperature=0.0)
    generate(engine, Request("load", short, params, adapter="tuned"))  # it is in a slot from now on
    got = generate(engine, Request("tuned", short, params, adapter="tuned"), Request("plain", long, params))
    assert merged.agrees(short, got["tuned"], 2e-2) and plain.agrees(long, got["plain"], 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("model_type", ["starcoder2", "gpt2", "bloom"])
def test_weights_may_be_rounded_at_load(model_type: str, weights: str, tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    reference, prompt = Reference(folder), prompt_of(random.Random(3), 60)
    engine = make_engine(folder, weights=weights)
    dense = make_engine(folder, weights="dense")
    assert engine.info.weight_bytes < 0.6 * dense.info.weight_bytes
    tokens = generate(engine, greedy("r", prompt, 1))["r"]
    spread = float(reference.logprobs(prompt)[-1].std())
    assert float(reference.margins(prompt, tokens).max()) < spread * (2 if weights == "int4" else 1)


CUSTOM = """
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class OddConfig(PretrainedConfig):
    model_type = "odd"

    def __init__(self, n_embd=32, n_layer=2, n_head=4, vocab_size=199, max_seq_len=512, **rest):
        self.n_embd, self.n_layer, self.n_head = n_embd, n_layer, n_head
        self.vocab_size, self.max_seq_len = vocab_size, max_seq_len
        super().__init__(**rest)


class Layer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.qkv = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.out = nn.Linear(config.n_embd, config.n_embd)
        self.norm = nn.LayerNorm(config.n_embd)

    def forward(self, x):
        heads = self.config.n_head
        q, k, v = (
            part.view(*x.shape[:2], heads, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager)
        y, _ = attend(self, q, k, v, None, scaling=0.3)
        return x + self.out(y.reshape(*x.shape))


def eager(module, q, k, v, mask, scaling=None, **_):
    scores = q @ k.transpose(-1, -2) * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(1, 2), None


class OddModel(PreTrainedModel):
    config_class = OddConfig
    base_model_prefix = "body"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.n_embd)
        self.places = nn.Embedding(config.max_seq_len, config.n_embd)
        self.blocks = nn.ModuleList(Layer(config, i) for i in range(config.n_layer))
        self.post_init()

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **_):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).unsqueeze(0)
        x = self.words(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return BaseModelOutputWithPast(last_hidden_state=x)


class OddForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OddConfig
    base_model_prefix = "body"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config):
        super().__init__(config)
        self.body = OddModel(config)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, **options):
        return CausalLMOutputWithPast(logits=self.head(self.body(input_ids, **options).last_hidden_state) * 0.7)
"""


def write_custom(folder: Path) -> Path:
    """A checkpoint with modelling code of its own."""
    import importlib.util

    folder.mkdir()
    (folder / "modeling_odd.py").write_text(CUSTOM)
    spec = importlib.util.spec_from_file_location("modeling_odd", folder / "modeling_odd.py")
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(4)
    model = module.OddForCausalLM(module.OddConfig())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4)
    model.save_pretrained(folder)
    code = {"AutoConfig": "modeling_odd.OddConfig", "AutoModelForCausalLM": "modeling_odd.OddForCausalLM"}
    return changed(folder, auto_map=code)


def test_custom_code_runs_only_where_it_is_allowed_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_custom(tmp_path / "odd")
    for allowed in ((), ("some/other",), (str(tmp_path),)):
        with pytest.raises(CheckpointError, match=rf"trust_remote_code: \[{folder}\]"):
            make_engine(folder, trust_remote_code=allowed)
    (folder / "penstock.json").write_text(json.dumps({"source": "hf:org/odd (abc)", "files": {}}))
    with pytest.raises(CheckpointError, match=r"trust_remote_code: \[org/odd\]"):
        make_engine(folder)

    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    prompts = {f"r{n}": prompt_of(random.Random(n), n) for n in (1, 17, 90)}
    for allowed in ((str(folder),), ("org/odd",), ("hf:org/odd",)):
        engine = make_engine(folder, trust_remote_code=allowed, token_budget=32)
        got = generate(engine, *(greedy(name, prompt, 8) for name, prompt in prompts.items()))
        for name, prompt in prompts.items():
            logits = expected(torch.tensor([prompt + got[name][:-1]])).logits[0, len(prompt) - 1 :]
            assert logits.argmax(-1).tolist() == got[name], name

    elsewhere = changed(folder, auto_map={"AutoModelForCausalLM": "org/code--modeling_odd.OddForCausalLM"})
    with pytest.raises(CheckpointError, match="not a file of the checkpoint"):
        make_engine(elsewhere, trust_remote_code=("org/odd",))


@pytest.mark.parametrize("fault", ["transposed", "of another layer"])
def test_a_wrong_matrix_is_found_in_16_bits(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, earlier = ModuleWeights.tensor, [torch.empty(0)]

    def wrong(weights: ModuleWeights, name: str, *others: Any) -> torch.Tensor:
        found = read(weights, name, *others)
        if "o_proj.weight" not in name:
            return found
        if "layers.2." in name:
            return found.t().contiguous() if fault == "transposed" else earlier[-1]
        earlier.append(found.clone())
        return found

    folder = write_foreign("starcoder2", tmp_path)
    make_engine(folder, dtype="bfloat16")
    monkeypatch.setattr(ModuleWeights, "tensor", wrong)
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.o_proj computes something else"):
        make_engine(folder, dtype="bfloat16")
