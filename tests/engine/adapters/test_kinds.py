"""Adapters of every kind that PEFT trains and the engine takes: what the model with one merged into it answers, in one
batch with others. A kind that cannot be applied is refused by name, with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.folder import default_rank, replaced_rows, stored_tokens
from penstock.engine.adapters.kinds import KINDS as READ
from penstock.engine.adapters.kinds import as_lora, low_rank, read_settings
from penstock.engine.adapters.kinds.refused import refusal
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import read_adapter
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.models.families import read_config
from penstock.engine.request import Request
from tests.engine.adapters.company import (
    assert_same_in_company,
    assert_same_in_deterministic_company,
    assert_same_on_ranks,
    on_grids,
    one_by_one,
)
from tests.engine.adapters.kind_files import CONFIG, KINDS, WEIGHTS, change, merged, write_kind
from tests.engine.adapters.test_end_rows import failure
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import drain, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference, write_checkpoint

LOW_RANK = [name for name in KINDS if name.partition("-")[0] not in ("ia3", "oft", "boft", "beft", "norms", "tokens")]
TOGETHER = ("loha", "ia3", "boft-butterfly", "oft", "vera", "beft", "norms", "ia3-inputs", "tokens", "adalora")
"""Those of the tests with engines that are not about each kind."""


class File:
    """See `Tensors`."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, key: str) -> torch.Tensor:
        return self._tensors[key]

    def get_slice(self, key: str) -> Any:
        shape = list(self._tensors[key].shape)
        return type("Slice", (), {"get_shape": lambda self: shape})()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-mha-bias", tmp_path_factory.mktemp("kinds") / "base")


@pytest.fixture(scope="module")
def folders(base: Path) -> dict[str, Path]:
    return {name: write_kind(base.parent / name, base, name, seed=seed) for seed, name in enumerate(KINDS)}


@pytest.fixture(scope="module")
def specs(folders: dict[str, Path]) -> tuple[AdapterSpec, ...]:
    return tuple(AdapterSpec(name, str(folders[name])) for name in TOGETHER)


def mixed() -> list[Request]:
    names = ["", *TOGETHER]
    return [ask(f"r{i}", prompt, names[i], 8) for i, prompt in enumerate(prompts(len(names)))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


@pytest.mark.parametrize("name", LOW_RANK)
def test_a_pair_of_matrices_is_the_change_that_the_kind_defines(
    base: Path, folders: dict[str, Path], name: str
) -> None:
    layout = layout_of(read_config(json.loads((base / "config.json").read_text())))
    raw, tensors = json.loads((folders[name] / CONFIG).read_text()), load_file(folders[name] / WEIGHTS)
    config, made = as_lora(raw, read_settings(raw), File(tensors), layout)
    weights = load_file(base / "model.safetensors")
    shared = {key.removeprefix("base_model."): value for key, value in tensors.items() if ".model." not in key}
    if name == "vera-drawn":
        reference = load_file(merged(base, folders[name], base.parent / "drawn merged") / "model.safetensors")
    pairs = [key.removesuffix(".lora_A.weight") for key in list(made.keys()) if key.endswith("lora_A.weight")]
    assert pairs
    for key in pairs:
        module = key.removeprefix("base_model.model.")
        weight = weights[f"{module}.weight"]
        a, b = (made.get_tensor(f"{key}.lora_{side}.weight") for side in "AB")
        own = {one.removeprefix(f"{key}."): value for one, value in tensors.items() if one.startswith(f"{key}.")}
        if name == "vera-drawn":
            expected = reference[f"{module}.weight"] - weight
        else:
            expected = change(raw, module, weight, own, shared)
        assert len(a) == config.rank_of(module) <= min(weight.shape)
        torch.testing.assert_close(b @ a * config.scale_of(module), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "names", [("lokr", "oft", "boft-butterfly"), pytest.param(tuple(KINDS), marks=pytest.mark.slow)]
)
def test_they_equal_merging_them(base: Path, folders: dict[str, Path], names: tuple[str, ...]) -> None:
    specs = tuple(AdapterSpec(name, str(folders[name])) for name in names)
    engine = make_engine(base, adapters=specs)
    plain, different = Reference(base), 0
    for number, name in enumerate(names):
        reference = Reference(merged(base, folders[name], base.parent / f"{name} merged {len(names)}"))
        for i, prompt in enumerate(prompts(2, seed=number)):
            prompt = [*prompt, 3, 7, 11, 150]
            got = generate(engine, ask(f"{name} {i}", prompt, name, 8))[f"{name} {i}"]
            assert reference.agrees(prompt, got, TIE), (name, reference.margins(prompt, got))
            different += not plain.agrees(prompt, got, TIE)
    assert different >= 2 * len(names) - 3, "the adapters make no difference"


def test_in_company_each_request_gets_what_it_gets_alone(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    assert_same_in_company(base, specs, mixed(), alone)


@pytest.mark.slow
def test_in_deterministic_company_too(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    assert_same_in_deterministic_company(base, specs, mixed)


@pytest.mark.slow
@on_grids
def test_ranks_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], grid: tuple[int, int]
) -> None:
    assert_same_on_ranks(base, specs, mixed(), alone, grid)


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_on_quantized_weights(base: Path, folders: dict[str, Path], weights: str) -> None:
    names = ("lokr", "ia3", "oft")
    engine = make_engine(
        base, adapters=tuple(AdapterSpec(name, str(folders[name])) for name in names), weights=weights,
        activations="int16",
    )  # fmt: skip
    prompt = prompts(1)[0]
    got = generate(engine, *(ask(name, prompt, name, 8) for name in names), ask("base", prompt, "", 8))
    for name in names if weights == "int8" else ():
        reference = Reference(merged(base, folders[name], base.parent / f"{name} for {weights}"))
        assert reference.agrees(prompt, got[name][:1], 1.0), name
    assert len({tuple(tokens) for tokens in got.values()}) == 4


def test_what_only_the_host_can_apply_is_known_as_such(base: Path, folders: dict[str, Path]) -> None:
    """Steps with these must never be captured, whatever a device can look up by slot."""
    layout = layout_of(read_config(json.loads((base / "config.json").read_text())))
    for name, by_host in (("oft", True), ("ia3-inputs", True), ("tokens", True), ("ia3", False), ("lokr", False)):
        found = read_adapter(name, folders[name], layout, max_rank=64, dtype=torch.float32, pin=False)
        assert found.by_host is by_host and found.further is (name != "lokr"), name


def test_slots_are_made_for_the_rank_that_a_kind_becomes(folders: dict[str, Path]) -> None:
    expected = {"loha": 16, "vera": 16, "lokr": 32, "adalora": 16, "ia3": 16, "tokens": 16}
    assert {name: default_rank([folders[name]]) for name in expected} == expected


def test_a_rank_above_the_limit_is_refused_with_what_to_do(base: Path, folders: dict[str, Path]) -> None:
    found = failure(base, folders["lokr"], adapter_rank=8)
    assert (
        "rank 32 is above adapter_rank 8; raise adapter_rank (LoKr becomes a LoRA of that rank here) or merge" in found
    )


def test_kinds_that_cannot_be_applied_are_refused_by_name(base: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    for kind, words in (
        ("HRA", "merge_and_unload"), ("FOURIERFT", "save_as_lora"), ("WAVEFT", "merge"),
        ("XLORA", "one by one"), ("SOMETHING_NEW", "merge_and_unload"), (None, "LORA"), (3, "LORA"),
    ):  # fmt: skip
        adapter = write_kind(tmp_path / str(kind), base, "miss")
        config = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps({**config, "peft_type": kind}))
        found = failure(base, adapter)
        assert f"peft_type {kind} is not supported" in found and words in found and "LOKR" in found, found
        assert refusal(kind, ("LORA", *READ)) in found


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("vera", {"save_projection": "yes", "bias": "some"}, "bias is 'some', which VeRA adapters do not support"),
        ("miss", {"init_weights": "bat"}, "init_weights is 'bat', which MiSS adapters do not support"),
        ("loha", {"use_something": True}, "use_something is True, a key that LoHa adapters do not know"),
        ("loha", {"r": 4, "rank_pattern": {}}, "here it must be ("),
        ("loha", {"r": 100000}, "r is 100000"),
        ("loha", {"target_modules": ["q_proj"]}, "which adapter_config.json leaves out"),
        ("ia3", {"target_modules": ["q_proj"]}, "which adapter_config.json leaves out"),
        ("adalora", {"lora_alpha": 0}, "lora_alpha of AdaLoRA must be above 0"),
        ("adalora", {"rank_pattern": None}, "has rank 3, and adapter_config.json gives it 5"),
        ("vblora", {"topk": 10}, "topk must be"),
        ("oft", {"num_cayley_neumann_terms": 0}, "num_cayley_neumann_terms must be"),
        ("oft", {"block_share": True}, "which are no rotations of"),
        ("oft", {"target_modules": ["q_proj"]}, "which adapter_config.json leaves out"),
        ("oft", {"use_cayley_neumann": "no"}, "use_cayley_neumann must be true or false"),
        ("tokens", {"token_indices": [1]}, "which does not fit trainable_token_indices"),
        ("delora", {"rank_pattern": {"q_proj": -4}}, "rank_pattern must give positive integers"),
        ("adalora", {"rank_pattern": ["q_proj"]}, "rank_pattern of AdaLoRA must be an object"),
    ],
)
def test_what_does_not_fit_is_refused(
    base: Path, tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    adapter = write_kind(tmp_path / "a", base, name)
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, **changes}))
    assert words in failure(base, adapter)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensors", "words"),
    [
        ("lokr", {f"{Q}.lokr_w1": torch.zeros(0, 4)}, "tensors of model.layers.0.self_attn.q_proj are empty"),
        ("vblora-topk", {f"{Q}.vblora_logits_A_topk_indices": -torch.ones(3, 4, 3)}, "the bank does not have"),
        ("vblora", {"base_model.vblora_vector_bank": torch.zeros(9, 24)}, "no multiple of vectors of 24"),
        ("vblora", {"base_model.vblora_vector_bank": torch.zeros(9)}, "not a list of vectors"),
        ("vera", {"base_model.vera_B": torch.zeros(200, 5)}, "which do not fit"),
        ("delora", {f"{Q}.delora_A": torch.zeros(65, 900), f"{Q}.delora_B": torch.zeros(900, 65),
                    f"{Q}.delora_w_norm": torch.zeros(900)}, "make one of 900 x 900, not 64 x 64"),
        ("ia3", {f"{Q}.lora_A.weight": torch.zeros(2, 64), f"{Q}.lora_B.weight": torch.zeros(64, 2)},
         "which IA3 does not have"),
        ("boft", {f"{Q}.boft_R": torch.zeros(2, 8, 8, 4)}, "which is no rotation of 64 inputs"),
        ("boft", {f"{Q}.boft_R": torch.zeros(6, 16, 4, 4)}, "which is no rotation of 64 inputs"),
        ("boft", {f"{Q}.boft_s": torch.ones(64)}, "here it must be (64, 1)"),
        ("ia3", {f"{Q}.input_blocks": torch.zeros(0, 0, 0)}, "which no adapter of PEFT has"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(
    base: Path, tmp_path: Path, name: str, tensors: dict[str, torch.Tensor], words: str
) -> None:
    adapter = write_kind(tmp_path / "a", base, name)
    if name == "delora":
        config = json.loads((adapter / CONFIG).read_text())
        (adapter / CONFIG).write_text(json.dumps({**config, "rank_pattern": {"layers.0.self_attn.q_proj": 65}}))
    save_file({**load_file(adapter / WEIGHTS), **tensors}, adapter / WEIGHTS)
    assert words in failure(base, adapter, adapter_rank=64)


def test_nothing_is_drawn_for_a_rank_that_does_not_fit(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_kind(tmp_path / "a", base, "vera-drawn")
    config = json.loads((adapter / CONFIG).read_text())
    (adapter / CONFIG).write_text(json.dumps({**config, "r": 8192}))
    monkeypatch.setattr(low_rank, "_projection", lambda *_: pytest.fail("drawn"))
    assert "rank 64 is above adapter_rank 16" in failure(base, adapter, adapter_rank=16)


def test_configurations_of_any_json_say_nothing_of_tokens_and_ranks(tmp_path: Path) -> None:
    for text in ('{"token_indices": [Infinity]}', "[" * 100_000, '{"peft_type": [], "r": {}}', "3"):
        (tmp_path / CONFIG).write_text(text)
        assert (default_rank([tmp_path]), stored_tokens(tmp_path)) == (16, 0)
        assert replaced_rows(tmp_path) <= 1


def test_missing_tensors_and_ranks_inside_of_blocks_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_kind(tmp_path / "a", base, "vera")
    tensors = load_file(adapter / WEIGHTS)
    save_file({key: value for key, value in tensors.items() if key != "base_model.vera_B"}, adapter / WEIGHTS)
    assert "has no vera_A and vera_B" in failure(base, adapter)
    adapter = write_kind(tmp_path / "c", base, "lokr", targets=("q_proj",))
    tensors = {key: value.repeat(40, 40) for key, value in load_file(adapter / WEIGHTS).items() if key.endswith("w1")}
    save_file({**load_file(adapter / WEIGHTS), **tensors}, adapter / WEIGHTS)
    assert "their product must be 64 x 64" in failure(base, adapter, adapter_rank=512)
    adapter = write_kind(tmp_path / "b", base, "oft", targets=("o_proj",))
    config = json.loads((adapter / CONFIG).read_text())
    blocks = {key: torch.zeros(1, 64 * 63 // 2) for key in load_file(adapter / WEIGHTS)}
    save_file(blocks, adapter / WEIGHTS)
    (adapter / CONFIG).write_text(json.dumps({**config, "oft_block_size": 64}))
    with threaded_engine(base, 2, 1, adapters=(AdapterSpec("b", str(adapter)),)) as engine:
        engine.submit(ask("r", [1, 2, 3], "b"))
        assert "lower tensor_parallel or merge" in next(delta.error for delta in drain(engine) if delta.error)
