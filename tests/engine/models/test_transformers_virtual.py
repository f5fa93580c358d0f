"""Virtual tokens of adapters before the prompts of models that run through transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.test_end_rows import failure
from tests.engine.foreign import without_families, write_foreign
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.models.test_transformers import prompt_of, write_lora
from tests.engine.parallel.threads import threaded_engine
from tests.engine.tiny import Reference

TIE = 2e-2
COUNT = 5


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


def write_rows(folder: Path, reference: Reference, *, kind: str = "PROMPT_TUNING") -> torch.Tensor:
    table = reference.model.get_input_embeddings().weight
    rows = torch.randn(COUNT, table.shape[1], generator=torch.Generator().manual_seed(3)) * table.std()
    folder.mkdir()
    save_file({"prompt_embeddings": rows}, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": kind, "task_type": "CAUSAL_LM", "num_virtual_tokens": COUNT, "num_transformer_submodules": 1,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return rows


@torch.inference_mode()
def margins(reference: Reference, rows: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    """How far each token is below the best one, behind rows that stand for no token, as PEFT calls the model."""
    embedded = reference.model.get_input_embeddings()(torch.tensor([prompt + output[:-1]]))
    logits = reference.model(inputs_embeds=torch.cat((rows[None], embedded), dim=1)).logits[0]
    logits = logits[len(rows) + len(prompt) - 1 :]
    return logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {}),
        *(
            pytest.param(name, settings, marks=pytest.mark.slow)
            for name, settings in (
                ("starcoder2", {"num_blocks": 24, "block_size": 4, "token_budget": 16}),
                ("bloom", {}),
                ("starcoder2", {"deterministic": True}),
            )
        ),
    ],
    ids=str,
)
def test_answers_are_those_behind_the_rows(model_type: str, settings: dict[str, int], tmp_path: Path) -> None:
    """In one batch with the model itself and with a LoRA."""
    base = write_foreign(model_type, tmp_path / "base")
    plain = Reference(base)
    rows = write_rows(tmp_path / "rows", plain)
    targets = {"gpt2": ("c_attn",), "bloom": ("query_key_value",), "starcoder2": ("q_proj",)}[model_type]
    (tmp_path / "lora").mkdir()
    lora, merged = write_lora(tmp_path / "lora", base, targets, transposed=model_type == "gpt2")
    specs = (AdapterSpec("rows", str(tmp_path / "rows")), AdapterSpec("lora", str(lora)))
    engine, rng = make_engine(base, adapters=specs, **settings), random.Random(4)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    asked = {f"r{i}": (prompt_of(rng, 6 + 7 * i), ("rows", "", "lora")[i % 3]) for i in range(5)}
    got = generate(engine, *(Request(id, prompt, params, adapter=name) for id, (prompt, name) in asked.items()))
    references, different = {"": plain, "lora": Reference(merged)}, 0
    for id, (prompt, name) in asked.items():
        if name == "rows":
            assert float(margins(plain, rows, prompt, got[id]).max()) <= TIE, id
            different += not plain.agrees(prompt, got[id], TIE)
        else:
            assert references[name].agrees(prompt, got[id], TIE), (id, name)
    assert different
    assert_idle(engine)


def test_what_cannot_be_applied_is_refused(tmp_path: Path) -> None:
    base = write_foreign("gpt2", tmp_path / "base")
    reference = Reference(base)
    write_rows(tmp_path / "prefix", reference, kind="PREFIX_TUNING")
    assert "prefix tuning adapters are not supported on models that run through" in failure(base, tmp_path / "prefix")
    write_rows(tmp_path / "rows", reference)
    lora, _ = write_lora(tmp_path, base, ("c_attn",), transposed=True)
    key = "base_model.model.transformer.wte.lora_embedding_A"
    vocabulary, hidden = reference.model.get_input_embeddings().weight.shape
    ends = {key: torch.ones(4, vocabulary), key.replace("_A", "_B"): torch.ones(hidden, 4)}
    save_file(ends, lora / "adapter_model.safetensors")
    assert "cannot apply 'base_model.model.transformer.wte.lora_embedding" in failure(base, lora)


@pytest.mark.slow
def test_on_several_devices_they_are_refused(tmp_path: Path) -> None:
    base = write_foreign("gpt2", tmp_path / "base")
    write_rows(tmp_path / "rows", Reference(base))
    with threaded_engine(base, 1, 2, adapters=(AdapterSpec("rows", str(tmp_path / "rows")),)) as engine:
        engine.submit(Request("r", [1, 2, 3], SamplingParams(max_tokens=2), adapter="rows"))
        assert "nor on several devices there" in next(delta.error for delta in drain(engine) if delta.error)
