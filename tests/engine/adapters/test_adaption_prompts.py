"""Adaption prompts (LLaMA-Adapter): what PEFT computes with one, in one batch with other adapters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters import adaption_prompts
from penstock.engine.adapters.adaption_prompts import AdaptionBank, AdaptionPrompts
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.interface import HeadLayout
from penstock.engine.request import Request
from tests import parts
from tests.engine.adapters.company import (
    assert_same_in_company,
    assert_same_in_deterministic_company,
    assert_same_on_ranks,
    on_grids,
    one_by_one,
)
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_end_rows import failure
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.harness import generate, make_engine
from tests.engine.tiny import Reference, write_checkpoint

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SETTINGS = {"some": (5, 2), "all": (9, 3)}
"""Tokens and layers of each adapter, of the three layers that there are."""


def write(folder: Path, base: Path, name: str, seed: int = 0, **config: Any) -> Path:
    """A random adapter for the checkpoint in `base`, as PEFT saves one."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((base / "config.json").read_text())
    count, layers = SETTINGS[name]
    draw, tensors = torch.Generator().manual_seed(seed), {}
    for layer in range(model["num_hidden_layers"] - layers, model["num_hidden_layers"]):
        at = f"base_model.model.model.layers.{layer}.self_attn.adaption_"
        tensors[f"{at}prompt"] = torch.randn(1, count, model["hidden_size"], generator=draw)
        tensors[f"{at}gate"] = 0.7 + 0.2 * torch.randn(1, generator=draw)
    save_file(tensors, folder / WEIGHTS)
    settings = {
        "peft_type": "ADAPTION_PROMPT", "task_type": "CAUSAL_LM", "adapter_len": count, "adapter_layers": layers,
        "target_modules": "self_attn", "inference_mode": True,
    }  # fmt: skip
    (folder / CONFIG).write_text(json.dumps({**settings, **config}))
    return folder


class Adapted(Reference):
    """The library's layers with what the paper adds to them."""

    def __init__(self, base: Path, adapter: Path) -> None:
        super().__init__(base)
        stored = load_file(adapter / WEIGHTS)
        for number, layer in enumerate(self.model.model.layers):
            at = f"base_model.model.model.layers.{number}.self_attn.adaption_"
            if f"{at}prompt" in stored:
                layer.self_attn.register_forward_hook(
                    self._hook(stored[f"{at}prompt"][0], stored[f"{at}gate"]), with_kwargs=True
                )

    def _hook(self, prompt: torch.Tensor, gate: torch.Tensor) -> Any:
        def added(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            hidden, (cos, sin), size = kwargs["hidden_states"][0], kwargs["position_embeddings"], module.head_dim
            q = module.q_proj(hidden).view(len(hidden), -1, size)
            half = size // 2
            turned = torch.cat((-q[..., half:], q[..., :half]), -1)
            q = q * cos[0].unsqueeze(1) + turned * sin[0].unsqueeze(1)
            k, v = (linear(prompt).view(len(prompt), -1, size) for linear in (module.k_proj, module.v_proj))
            k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
            scores = torch.einsum("thd,phd->thp", q, k) / math.sqrt(size)
            seen = torch.einsum("thp,phd->thd", gate * scores.softmax(-1), v)
            return output[0] + module.o_proj(seen.flatten(1))[None], *output[1:]

        return added


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("adaption") / "base")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    folders = {name: write(base.parent / name, base, name, seed) for seed, name in enumerate(SETTINGS)}
    folders["lora"] = write_adapter(base.parent / "lora", base, rank=4)
    return tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items())


def mixed() -> list[Request]:
    names = ["some", "", "all", "lora"]
    return [ask(f"r{i}", prompt, names[i % 4], 8) for i, prompt in enumerate(prompts(8))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


def test_answers_are_those_of_the_paper(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    references = {spec.name: Adapted(base, Path(spec.source)) for spec in specs[:2]}
    plain, different = Reference(base), 0
    for request in mixed():
        got, reference = alone[request.request_id], references.get(request.adapter)
        if reference is not None:
            assert reference.agrees(request.prompt, got, TIE), reference.margins(request.prompt, got)
            different += not plain.agrees(request.prompt, got, TIE)
    assert different >= 3


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "tie"), [({"kv_dtype": "int8"}, 0.3), ({"weights": "int8", "activations": "int16"}, 0.5)], ids=str
)
def test_with_few_bits(base: Path, specs: tuple[AdapterSpec, ...], settings: dict[str, Any], tie: float) -> None:
    engine, reference = make_engine(base, adapters=specs, **settings), Adapted(base, Path(specs[1].source))
    for i, prompt in enumerate(prompts(3)):
        got = generate(engine, ask(f"r{i}", prompt, "all", 6))[f"r{i}"]
        assert reference.agrees(prompt, got, tie), reference.margins(prompt, got)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "llama-mha-bias", "mistral-window"])
def test_what_peft_saves_and_computes(tmp_path: Path, family: str) -> None:
    """Where the output projection has a bias, that of the addition counts too."""
    peft = parts.library("peft")
    heads = {"head_dim": 16} if family == "mistral-window" else {}  # PEFT divides the width of layers by it
    base = write_checkpoint(family, tmp_path / "base", **heads)
    theirs = Reference(base)
    config = peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=6, adapter_layers=2)
    theirs.model = peft.get_peft_model(theirs.model, config).eval()
    with torch.no_grad():
        for name, parameter in theirs.model.named_parameters():
            if "adaption_gate" in name:
                parameter.fill_(0.8)
    theirs.model.save_pretrained(tmp_path / "adapter")
    engine, plain = make_engine(base, adapters=(AdapterSpec("a", str(tmp_path / "adapter")),)), Reference(base)
    for i, prompt in enumerate(prompts(3)):
        got = generate(engine, ask(f"r{i}", prompt, "a", 8))[f"r{i}"]
        with torch.inference_mode():
            logits = theirs.model(input_ids=torch.tensor([prompt + got[:-1]])).logits[0, len(prompt) - 1 :]
        margins = logits.amax(-1) - logits.gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)
        assert float(margins.max()) <= TIE, margins
        assert not plain.agrees(prompt, got, TIE)


def test_long_prompts_and_many_learned_tokens_need_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache was sized without adapters: what their steps need besides must have a bound."""
    heads, draw = HeadLayout(4, 2, 8, 8**-0.5), torch.Generator().manual_seed(0)
    bank = AdaptionBank(1, torch.device("cpu"))
    bank.put(0, AdaptionPrompts({0: torch.randn(2, 500, 16, generator=draw)}))
    bank.begin(np.zeros(300, np.int32))
    q = torch.randn(300, 4, 8, generator=draw)
    whole, parts = torch.zeros(300, 32), torch.zeros(300, 32)
    bank.add(q, whole, heads, 0, None)
    einsum, sizes = torch.einsum, []

    def noted(form: str, *of: torch.Tensor) -> torch.Tensor:
        found = einsum(form, *of)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(adaption_prompts, "_AT_ONCE", 30_000)
    monkeypatch.setattr(torch, "einsum", noted)
    bank.add(q, parts, heads, 0, None)
    torch.testing.assert_close(parts, whole)
    assert max(sizes) <= 30_000 < 300 * 4 * 500


def test_what_cannot_be_applied_is_refused(base: Path, tmp_path: Path) -> None:
    assert "and adapter_config.json says [2]" in failure(base, write(tmp_path / "a", base, "some", adapter_layers=1))
    assert "here it must be (1, 4, 64)" in failure(base, write(tmp_path / "b", base, "some", adapter_len=4))
    assert "adapter_len must be" in failure(base, write(tmp_path / "c", base, "some", adapter_len="x"))
    folder = write(tmp_path / "d", base, "some")
    tensors = load_file(folder / WEIGHTS)
    save_file(
        {key: value for key, value in tensors.items() if "layers.2" not in key or "gate" not in key}, folder / WEIGHTS
    )
    assert "layer 2 has no adaption_gate" in failure(base, folder)
    tensors = {key: value.reshape(()) if key.endswith("gate") else value for key, value in tensors.items()}
    save_file(tensors, folder / WEIGHTS)
    assert generate(make_engine(base, adapters=(AdapterSpec("a", str(folder)),)), ask("r", [1, 2, 3], "a")).get("r")
    other = write_checkpoint("qwen2-bias", tmp_path / "other")
    assert "PEFT has none for qwen2 models" in failure(other, write(tmp_path / "e", other, "some"))
