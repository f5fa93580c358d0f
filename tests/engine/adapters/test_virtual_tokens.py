"""Prompt tuning, p-tuning and CPT: stored rows of embeddings before every prompt, as virtual tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.backends.errors import error_of
from penstock.engine.adapters.spec import AdapterSpec, AdapterStatus
from penstock.engine.core import Engine
from penstock.engine.kv.block_hash import block_names
from penstock.engine.request import Request, SamplingParams
from tests import parts
from tests.engine.adapters.company import (
    TIGHT,
    assert_same_in_company,
    assert_same_in_deterministic_company,
    one_by_one,
)
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.test_end_rows import failure
from tests.engine.adapters.test_equals_merging import TIE, ask, prompts
from tests.engine.adapters.virtual_files import TOKENS, Prefixed, write_prompt
from tests.engine.harness import assert_idle, drain, generate, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import eager_engine
from tests.engine.tiny import Reference, write_checkpoint

OWN = 199


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-mqa-tied", tmp_path_factory.mktemp("virtual") / "base")


@pytest.fixture(scope="module")
def specs(base: Path) -> tuple[AdapterSpec, ...]:
    """With a LoRA among them."""
    folders = {name: write_prompt(base.parent / name, base, name, seed=seed) for seed, name in enumerate(TOKENS)}
    folders["lora"] = write_adapter(base.parent / "lora", base, rank=4)
    return tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items())


def mixed(count: int = 10) -> list[Request]:
    names = ["tuned", "", "encoded", "lora", "cpt"]
    return [ask(f"r{i}", prompt, names[i % 5], 8) for i, prompt in enumerate(prompts(count))]


@pytest.fixture(scope="module")
def alone(base: Path, specs: tuple[AdapterSpec, ...]) -> dict[str, list[int]]:
    return one_by_one(make_engine(base, adapters=specs), mixed())


@pytest.mark.parametrize(
    "family",
    [
        "llama-mqa-tied",
        *(pytest.param(family, marks=pytest.mark.slow) for family in ("granite", "gemma2", "qwen3-next")),
    ],
)
def test_answers_are_those_behind_the_rows(tmp_path: Path, family: str) -> None:
    base = write_checkpoint(family, tmp_path / "base")
    plain, different = Reference(base), 0
    folders = {name: write_prompt(tmp_path / name, base, name, seed=3, spread=2.0) for name in ("tuned", "encoded")}
    engine = make_engine(base, adapters=tuple(AdapterSpec(name, str(folder)) for name, folder in folders.items()))
    assert engine.info.vocab_size == plain.model.config.vocab_size + TOKENS["encoded"]
    for name, folder in folders.items():
        reference = Prefixed(base, folder)
        for i, prompt in enumerate(prompts(2)):
            got = generate(engine, ask(f"{name} {i}", prompt, name, 6))[f"{name} {i}"]
            assert reference.agrees(prompt, got, TIE), (name, reference.margins(prompt, got))
            different += not plain.agrees(prompt, got, TIE)
    assert different, "the rows make no difference"
    assert_idle(engine)


@pytest.mark.slow  # quick beside prefixes: `test_prefixes.py`
def test_in_company_each_request_gets_what_it_gets_alone(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]
) -> None:
    """Prompts in chunks that end among the virtual tokens, too."""
    assert_same_in_company(base, specs, mixed(), alone, TIGHT | {"num_blocks": 30})


@pytest.mark.slow
def test_in_deterministic_company_too(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    assert_same_in_deterministic_company(base, specs, mixed)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(2, 2), (1, 3)], ids=str)
def test_ranks_give_the_same(
    base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]], grid: tuple[int, int]
) -> None:
    with threaded_engine(base, *grid, adapters=specs, token_budget=16) as engine:
        assert generate(engine, *mixed()) == alone


@pytest.mark.slow
def test_with_a_draft_model_too(base: Path, specs: tuple[AdapterSpec, ...], alone: dict[str, list[int]]) -> None:
    """It knows no virtual tokens: their sequences get no drafts."""
    settings: dict[str, Any] = {"speculation": "draft", "draft_model": str(base), "num_blocks": 60, "block_size": 4}
    engine = eager_engine(base, adapters=specs, token_budget=24, **settings)
    assert generate(engine, *mixed()) == alone
    assert engine.speculation is not None and not engine.speculation.broken
    assert engine.load_snapshot().draft_tokens > 0


def first_delta(engine: Engine, request: Request) -> Any:
    engine.submit(request)
    return next(delta for delta in drain(engine) if delta.cached_tokens is not None)


def test_what_clients_are_told_leaves_them_out(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    """Cached tokens, log-probabilities of the prompt, limits and penalties: all of the prompt as it was sent."""
    engine = make_engine(base, adapters=specs, block_size=4, token_budget=12)
    prompt = [(11 * i) % OWN for i in range(18)]
    greedy = SamplingParams(max_tokens=5, temperature=0.0)
    assert first_delta(engine, Request("a", prompt, greedy, adapter="encoded")).cached_tokens == 0
    again = first_delta(engine, Request("b", prompt, greedy, adapter="encoded"))
    known = (len(prompt) + 21 - 1) // 4 * 4
    assert again.cached_tokens == known - 21
    assert first_delta(engine, Request("c", prompt[:2], greedy, adapter="encoded")).cached_tokens == 0
    for other in ("tuned", ""):
        assert first_delta(engine, Request(f"d{other}", prompt, greedy, adapter=other)).cached_tokens == 0
    scored = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2)
    reference = Prefixed(base, Path(specs[1].source)).logprobs(prompt)
    found = first_delta(engine, Request("e", prompt, scored, adapter="encoded")).prompt_logprobs
    assert len(found) == len(prompt) and found[0] is None
    expected = [float(reference[at, token]) for at, token in enumerate(prompt[1:])]
    assert [each.logprob for each in found[1:]] == pytest.approx(expected, abs=2e-3)
    penalized = SamplingParams(max_tokens=6, temperature=0.0, repetition_penalty=5.0, presence_penalty=1.0)
    got = generate(engine, Request("f", prompt, penalized, adapter="encoded"))["f"]
    assert len(got) == 6 and not set(got) & set(prompt) and max(got) < OWN
    assert_idle(engine)


def test_the_context_window_holds_them_too(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    engine = make_engine(base, adapters=specs, max_model_len=40)
    for _ in range(2):  # before it is loaded, and after
        engine.submit(Request("long", [3] * 19, SamplingParams(max_tokens=9), adapter="encoded"))
        (delta,) = drain(engine)
        assert delta.error == (
            "prompt is too long: 40 tokens > 39 maximum, with the 21 virtual tokens that its adapter puts before it; "
            "shorten the prompt"
        )
        refused = error_of(delta)
        assert (refused.status, refused.code) == (400, "context_length_exceeded")
        assert refused.message == f"{delta.error}."
    params = SamplingParams(max_tokens=30, temperature=0.0)
    assert len(generate(engine, Request("fits", [3] * 15, params, adapter="encoded"))["fits"]) == 4
    assert len(generate(engine, Request("base", [3] * 15, params))["base"]) == 25


@pytest.mark.parametrize("end", ["abort", "timeout"])
def test_a_request_that_cannot_have_its_adapter_may_end_before_it_is_refused(
    base: Path, specs: tuple[AdapterSpec, ...], end: str
) -> None:
    engine = make_engine(base, adapters=specs, max_model_len=40)
    generate(engine, ask("first", [3], "encoded", 1))  # which is in memory now, so that others learn at once
    timeout_s = 0.0 if end == "timeout" else None
    engine.submit(Request("long", [3] * 19, SamplingParams(max_tokens=9), adapter="encoded", timeout_s=timeout_s))
    if end == "abort":
        engine.abort("long")
    (delta,) = drain(engine)
    assert (delta.finish_reason, delta.error) == (end, None)
    assert_idle(engine)


def test_prompts_cannot_name_them(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    engine = make_engine(base, adapters=specs)
    for _ in range(2):
        engine.submit(ask("named", [5, OWN], "tuned"))
        assert any("does not have all of the prompt's" in (delta.error or "") for delta in drain(engine))


@pytest.mark.parametrize("adapter", ["tuned", "lora"])
def test_answers_cannot_be_made_of_tokens_that_the_adapter_lacks(
    base: Path, specs: tuple[AdapterSpec, ...], adapter: str
) -> None:
    engine = make_engine(base, adapters=specs)
    for _ in range(2):
        engine.submit(Request("none", [5, 6], SamplingParams(allowed_token_ids=(7, OWN + 1)), adapter=adapter))
        (delta,) = drain(engine)
        assert delta.error is not None and error_of(delta).status == 400
        assert "does not have all of the prompt's and the allowed; it has those up to 198" in delta.error
    got = generate(engine, Request("some", [5, 6], SamplingParams(allowed_token_ids=(7, 8)), adapter=adapter))
    assert set(got["some"]) <= {7, 8}


def test_they_can_be_loaded_later_where_there_is_room(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    found: list[AdapterStatus] = []
    for room in (0, 21):
        engine = make_engine(base, adapter_slots=2, adapter_tokens=room)
        assert engine.adapters is not None
        engine.adapters.load(AdapterSpec("later", specs[1].source), found.append)
        while len(found) < (1 if not room else 2):
            engine.step()
    assert "puts 21 virtual tokens before prompts; set adapter_tokens: 21 or more" in found[0].error
    assert (found[1].state, found[1].kind, found[1].error) == ("ready", "p-tuning", "")
    prompt = prompts(1)[0]
    got = generate(engine, ask("later", prompt, "later", 6))["later"]
    assert Prefixed(base, Path(specs[1].source)).agrees(prompt, got, TIE)


def test_steps_behind_them_are_those_of_the_model(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    """Recorded, as without any adapter: only what computes virtual tokens knows of them."""
    engine = make_engine(base, adapters=specs, token_budget=8)
    assert engine.runner.adapters is not None
    seen: list[tuple[int, int]] = []
    begin = engine.runner.adapters.begin

    def noted(batch: Any) -> Any:
        seen.extend((chunk.start, chunk.slot) for chunk in batch.chunks)
        return begin(batch)

    engine.runner.adapters.begin = noted  # type: ignore[method-assign]
    generate(engine, ask("long", [7] * 20, "encoded", 4))
    assert {start < 21 for start, _ in seen} == {True, False}
    assert all((start < 21) is (slot >= 0) for start, slot in seen)


def test_names_of_blocks_begin_with_them(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    """For engines that hand blocks over."""
    engine = make_engine(base, adapters=specs, block_size=4, role="decode")
    generate(engine, ask("first", [3, 4], "tuned", 2))
    assert engine.exchange is not None and engine.adapters is not None
    request = ask("next", [9] * 12, "tuned", 2)
    version = engine.adapters.version("tuned")
    assert version is not None and engine.exchange.virtual(request) == 5
    expected = block_names([*range(OWN, OWN + 5), *[9] * 11], 4, "", version)
    assert engine.exchange.names(request) == expected and len(expected) == 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_virtual_tokens": 4}, "prompt_embeddings is (5, 64), and adapter_config.json says (4, 64)"),
        ({"num_virtual_tokens": 0}, "num_virtual_tokens must be a positive integer"),
        ({"token_dim": None, "num_transformer_submodules": 2}, "num_transformer_submodules is 2"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "MULTITASK_PROMPT_TUNING"}, "has no prefix_task_cols and prefix_task_rows"),
    ],
)
def test_what_cannot_be_applied_is_refused(base: Path, tmp_path: Path, change: dict[str, Any], words: str) -> None:
    assert words in failure(base, write_prompt(tmp_path / "odd", base, "tuned", **change), adapter_tokens=32)


@pytest.mark.slow
def test_a_family_whose_tokens_are_others_beside_rows_is_refused(tmp_path: Path) -> None:
    base = write_checkpoint("falcon-h1", tmp_path / "base")
    assert "is not supported for this family" in failure(base, write_prompt(tmp_path / "tuned", base, "tuned"))


def test_rows_of_another_model_are_refused(base: Path, tmp_path: Path) -> None:
    folder = write_prompt(tmp_path / "odd", base, "tuned", token_dim=32)
    save_file({"prompt_embeddings": torch.ones(5, 32)}, folder / "adapter_model.safetensors")
    assert "rows of the model's embed_tokens have 64 numbers" in failure(base, folder)
    save_file({"other": torch.ones(5, 64)}, folder / "adapter_model.safetensors")
    assert "has no prompt_embeddings" in failure(base, folder)


@pytest.mark.slow
def test_random_prompts_of_all_lengths(base: Path, specs: tuple[AdapterSpec, ...]) -> None:
    """Whatever the length of the first chunk: it may end before, at and behind the last virtual token."""
    rng = random.Random(5)
    requests = [ask(f"n{n}", [rng.randrange(OWN) for _ in range(n)], "encoded", 3) for n in (1, 2, 3, 11)]
    expected = one_by_one(make_engine(base, adapters=specs), requests)
    for budget in (7, 20, 21, 22):
        engine = make_engine(base, adapters=specs, token_budget=budget, max_running=min(4, budget))
        assert generate(engine, *requests) == expected, budget


def write_tasks(folder: Path, base: Path, **config: Any) -> Path:
    """Rows of three tasks, as PEFT saves multitask prompt tuning."""
    settings = {"peft_type": "MULTITASK_PROMPT_TUNING", "num_tasks": 3, "num_ranks": 2, **config}
    write_prompt(folder, base, "tuned", **settings)
    tensors, draw = load_file(folder / "adapter_model.safetensors"), torch.Generator().manual_seed(4)
    count, hidden = tensors["prompt_embeddings"].shape
    tensors["prefix_task_cols"] = torch.randn(3, count, 2, generator=draw)
    tensors["prefix_task_rows"] = torch.randn(3, 2, hidden, generator=draw)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_each_task_of_an_adapter_has_rows_of_its_own(base: Path, tmp_path: Path) -> None:
    folders = [write_tasks(tmp_path / str(task), base, task_id=task) for task in range(3)]
    specs = tuple(AdapterSpec(f"task{task}", str(folder)) for task, folder in enumerate(folders))
    prompt = prompts(1)[0]
    requests = [ask(f"r{task}", prompt, f"task{task}", 6) for task in range(3)]
    got = generate(make_engine(base, adapters=specs), *requests)
    for task, folder in enumerate(folders):
        reference, stored = Prefixed(base, folder), load_file(folder / "adapter_model.safetensors")
        reference.rows = reference.rows * (stored["prefix_task_cols"][task] @ stored["prefix_task_rows"][task])
        assert reference.agrees(prompt, got[f"r{task}"], TIE), task
    assert len({tuple(each) for each in got.values()}) == 3


def test_a_task_has_to_be_named(base: Path, tmp_path: Path) -> None:
    assert "the adapter has 3 tasks; add task_id, 0 to 2" in failure(base, write_tasks(tmp_path / "a", base))
    assert "task_id must be 0 to 2" in failure(base, write_tasks(tmp_path / "b", base, task_id=3))
    assert "num_tasks must be" in failure(base, write_tasks(tmp_path / "c", base, num_tasks=0))
    folder = write_tasks(tmp_path / "d", base, task_id=1)
    tensors = load_file(folder / "adapter_model.safetensors")
    for columns in (torch.ones(3, 4, 2), torch.tensor(1.0)):
        save_file({**tensors, "prefix_task_cols": columns}, folder / "adapter_model.safetensors")
        assert "which do not fit 3 tasks" in failure(base, folder)


def test_what_tasks_have_may_be_stored_in_other_types_than_rows(base: Path, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "a", base, task_id=1)
    tensors, prompt = load_file(folder / "adapter_model.safetensors"), prompts(1)[0]
    tensors["prefix_task_cols"] = tensors["prefix_task_cols"].bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    got = generate(make_engine(base, adapters=(AdapterSpec("a", str(folder)),)), ask("r", prompt, "a", 6))["r"]
    reference = Prefixed(base, folder)
    reference.rows = reference.rows * (tensors["prefix_task_cols"][1].float() @ tensors["prefix_task_rows"][1])
    assert got and reference.agrees(prompt, got, TIE)


@pytest.mark.slow
def test_tasks_that_peft_saves(base: Path, tmp_path: Path) -> None:
    peft = parts.library("peft")
    config = peft.MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_tasks=3, num_ranks=2)
    theirs = peft.get_peft_model(Reference(base).model, config).eval()
    with torch.no_grad():
        for parameter in theirs.prompt_encoder.parameters():
            parameter.normal_()
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "task_id": 2}))
    prompt = prompts(1)[0]
    got = generate(make_engine(base, adapters=(AdapterSpec("a", str(tmp_path)),)), ask("r", prompt, "a", 8))["r"]
    with torch.inference_mode():
        tokens = torch.tensor([prompt + got[:-1]])
        logits = theirs(input_ids=tokens, task_ids=torch.tensor([2])).logits[0, 4 + len(prompt) - 1 :]
    assert float((logits.amax(-1) - logits.gather(1, torch.tensor(got).unsqueeze(1)).squeeze(1)).max()) <= TIE
    assert not Reference(base).agrees(prompt, got, TIE)
