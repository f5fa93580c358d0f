"""Every key of peft's `LoraConfig` is honoured or refused: each is changed in turn, and what is added to the model must
stay what peft would add, or the adapter must be refused by the name of the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import LoadedAdapter, read_adapter
from penstock.engine.adapters.peft_config import RULES
from penstock.engine.models.families import read_config
from penstock.errors import CheckpointError
from tests import parts
from tests.engine.adapters.files import write_adapter
from tests.engine.tiny import Reference, write_checkpoint

DEFAULTS: dict[str, Any] = {
    "task_type": None, "peft_type": "LORA", "auto_mapping": None, "peft_version": "0.21.2",
    "base_model_name_or_path": None, "revision": None, "inference_mode": False, "r": 8, "target_modules": None,
    "exclude_modules": None, "lora_alpha": 8, "lora_dropout": 0.0, "fan_in_fan_out": False, "bias": "none",
    "use_rslora": False, "modules_to_save": None, "init_lora_weights": True, "layers_to_transform": None,
    "layers_pattern": None, "rank_pattern": {}, "alpha_pattern": {}, "megatron_config": None,
    "megatron_core": "megatron.core", "trainable_token_indices": None, "loftq_config": {}, "eva_config": None,
    "corda_config": None, "lora_ga_config": None, "use_dora": False, "velora_config": None,
    "alora_invocation_tokens": None, "use_qalora": False, "qalora_group_size": 16, "monteclora_config": None,
    "layer_replication": None, "lora_bias": False, "target_parameters": None, "use_bdlora": None, "arrow_config": None,
    "kasa_config": None, "ensure_weight_tying": False,
}  # fmt: skip
"""`LoraConfig().to_dict()` of peft 0.21.2."""
TRIED: dict[str, list[Any]] = {
    "init_lora_weights": [
        True, False, "gaussian", "eva", "orthogonal", "pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", 1,
    ],
    "bias": ["all", "lora_only"],
    "rank_pattern": [{"q_proj": 4}, {"o_proj": 4}, {"(a+)+b": 4}, {"q_proj": True}],
    "alpha_pattern": [{"q_proj": 4}, {r".*\.q_proj": 4}, {"(a+)+b": 4}, {"q_proj": "x"}, [1]],
    "layer_replication": [[[0, 2], [1, 3]]],
    "alora_invocation_tokens": [[1, 2, 3]],
    "modules_to_save": [["lm_head"], ["embed_tokens"]],
    "trainable_token_indices": [[1], {"embed_tokens": [1]}],
    "target_parameters": [["mlp.experts.gate_up_proj"]],
    "target_modules": [["q_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], "all-linear", ".*", [], 3, [3]],
    "exclude_modules": [["v_proj"], ["lm_head"], "lm_head", 3, [3]],
    "layers_to_transform": [[0], [0, 1, 2], 0, [], "x"],
    "peft_type": ["HRA", None],
    "r": [4, 9, 0, True, "8", None],
    "lora_alpha": [16, 8.5, "8", None, True],
}  # fmt: skip
CHANGED = {"lora_alpha", "use_rslora", "alpha_pattern"}
"""Keys that change what is added."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def layout(base: Path) -> AdapterLayout:
    return layout_of(read_config(json.loads((base / "config.json").read_text())))


def load(folder: Path, layout: AdapterLayout) -> LoadedAdapter:
    return read_adapter("a", folder, layout, max_rank=16, dtype=torch.float32, pin=False)


def test_every_key_is_declared() -> None:
    known = {*RULES.read, *RULES.limited, *RULES.inert, *RULES.reference}
    assert set(DEFAULTS) <= known
    assert all(DEFAULTS[key] == default for key, default in RULES.reference.items())


def test_each_key_is_honoured_or_refused(base: Path, layout: AdapterLayout, tmp_path: Path) -> None:
    settings = {**DEFAULTS, "target_modules": ["q_proj", "v_proj"]}
    folder = write_adapter(tmp_path, base, rank=8, alpha=8, targets=("q_proj", "v_proj"))
    config = folder / "adapter_config.json"
    config.write_text(json.dumps(settings))
    plain = load(folder, layout)
    refused = set()
    for key, default in DEFAULTS.items():
        for value in TRIED.get(key, [True, {"a": 1}, [1], "x", 7] if default is None else [not default, "x"]):
            config.write_text(json.dumps({**settings, key: value}))
            try:
                found = load(folder, layout)
            except CheckpointError as error:
                assert key in str(error) or key == "r", (key, value, str(error))
                refused.add((key, str(value)))
                continue
            assert (key in CHANGED) or torch.equal(found.data, plain.data), (key, value)
    assert refused >= {
        ("alora_invocation_tokens", "[1, 2, 3]"), ("layer_replication", "[[0, 2], [1, 3]]"),
        ("init_lora_weights", "loftq"), ("init_lora_weights", "lora_ga"), ("init_lora_weights", "corda"),
        ("rank_pattern", "{'q_proj': 4}"), ("rank_pattern", "{'(a+)+b': 4}"),
        ("use_qalora", "True"), ("kasa_config", "True"),
        ("target_modules", "['q_proj']"), ("target_modules", "3"),
        ("exclude_modules", "['v_proj']"), ("layers_to_transform", "[0]"),
        ("r", "4"), ("lora_bias", "True"),
    }  # fmt: skip
    assert not {(key, value) for key, value in refused if value in ("all-linear", ".*", "eva", "gaussian")}


def test_scales_are_those_of_the_reference(base: Path, layout: AdapterLayout, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, base, rank=4, alpha=4, targets=("q_proj",))
    config = json.loads((folder / "adapter_config.json").read_text())
    plain = load(folder, layout).data
    for changes, times in (({"lora_alpha": 12}, 3.0), ({"use_rslora": True}, 2.0), ({"lora_alpha": -4}, -1.0)):
        (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
        place = layout.place(0, 0)
        start = 4 * (place.start + len(place.site.sizes) * place.site.inputs)
        up = slice(start, start + 4 * place.site.outputs)
        torch.testing.assert_close(load(folder, layout).data[up], plain[up] * times)


def test_a_switch_that_nobody_knows_is_refused(base: Path, layout: AdapterLayout, tmp_path: Path) -> None:
    for value, harmless in ((True, False), ({"a": 1}, False), ([1], False), (False, True), (None, True), (16, True)):
        folder = write_adapter(tmp_path, base, targets=("q_proj",), use_something_new=value)
        if harmless:
            load(folder, layout)
        else:
            with pytest.raises(CheckpointError, match="use_something_new"):
                load(folder, layout)


@pytest.mark.slow
def test_what_is_loaded_equals_peft(base: Path, tmp_path: Path) -> None:
    peft = parts.library("peft")
    assert {key for key in peft.LoraConfig().to_dict() if key != "runtime_config"} == set(DEFAULTS)
    from penstock.engine.adapters.spec import AdapterSpec
    from tests.engine.adapters.files import merge
    from tests.engine.adapters.test_equals_merging import ask
    from tests.engine.harness import generate, make_engine

    for index, changes in enumerate(
        ({}, {"use_rslora": True}, {"lora_dropout": 0.5}, {"init_lora_weights": "gaussian"}, {"lora_alpha": 3})
    ):
        folder = write_adapter(tmp_path / f"a{index}", base, rank=8, seed=index, **changes)
        theirs = peft.PeftModel.from_pretrained(Reference(base).model, folder).merge_and_unload().eval()
        prompt = [7, 1, 190, 33, 4]
        engine = make_engine(base, adapters=(AdapterSpec("a", str(folder)),))
        tokens = generate(engine, ask("x", prompt, "a", 12))["x"]
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        assert float((logits.amax(-1) - chosen).max()) < 0.02, changes
        assert Reference(merge(base, folder, tmp_path / f"m{index}")).agrees(prompt, tokens, 0.02)
