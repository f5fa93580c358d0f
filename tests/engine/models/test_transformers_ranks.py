"""Models that run through `transformers`, on several devices: stages have their own layers only, shards parts of each,
and the tokens are the library's."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.models.transformers import load
from penstock.engine.models.transformers.body import (
    CannotDivide,
    Elsewhere,
    Junction,
    NoEmbedding,
    StageBody,
    layers_of,
)
from penstock.engine.models.transformers.comparison import Comparison
from penstock.engine.models.transformers.decoder import TransformersDecoder
from penstock.engine.models.transformers.dependencies import LayerProbe
from penstock.engine.models.transformers.hidden import PackedPass, SequencePass
from penstock.engine.parallel.groups import Groups
from penstock.engine.request import Request, SamplingParams
from penstock.errors import CheckpointError, ConfigError
from tests.engine.foreign import STATEFUL, without_families, write_foreign
from tests.engine.harness import assert_idle, generate, greedy
from tests.engine.models.test_transformers import WITHOUT_FAMILY, prompt_of, write_lora
from tests.engine.models.test_transformers_stored import PROMPTS, is_linear
from tests.engine.parallel.threads import threaded_engine
from tests.engine.quantization.layouts import write
from tests.engine.tiny import Reference

WHOLE = {"bitnet", "jetmoe"}
"""Norms over whole rows between their linears, or experts in the place of these: every shard has all of them."""
QUICK = {("starcoder2", 2, 1), ("gemma3n_text", 1, 2)}
CASES = [
    pytest.param(
        name, tensor, pipeline, marks=() if (name, tensor, pipeline) in QUICK else pytest.mark.slow
    )
    for name in WITHOUT_FAMILY
    if name not in STATEFUL
    for tensor, pipeline in ((1, 2), (2, 1), (2, 2))
]  # fmt: skip


@pytest.fixture(autouse=True)
def through_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    without_families(monkeypatch)


@pytest.mark.parametrize(("model_type", "tensor", "pipeline"), CASES)
def test_tokens_equal_the_library(model_type: str, tensor: int, pipeline: int, tmp_path: Path) -> None:
    folder = write_foreign(model_type, tmp_path)
    reference, rng = Reference(folder), random.Random(7)
    prompts = {f"r{n}": prompt_of(rng, n) for n in (1, 17, 70)}
    requests = [greedy(f"{again}{name}", prompt, 10) for name, prompt in prompts.items() for again in ("", "again-")]
    with threaded_engine(folder, tensor, pipeline, token_budget=48, num_blocks=40, max_running=4) as engine:
        got = generate(engine, *requests)
        for name, prompt in prompts.items():
            assert len(got[name]) == 10 and reference.agrees(prompt, got[name]), name
            assert got[f"again-{name}"] == got[name]
        assert_idle(engine)
        assert engine.info.runs_through == "transformers"
        part: Any = engine.runner.decoder.stage.decoder  # type: ignore[attr-defined]
        assert isinstance(part, TransformersDecoder)
        if (model_type, tensor) == ("starcoder2", 2):
            assert part.cuts.rows and part.cuts.columns and part.cuts.heads
        if pipeline > 1:
            assert part.stage is not None
            (begin, end), count = part.stage.junction.span, part.stage.junction.layers
            # The first half of the layers; the others were never read here.
            assert begin == 0 < end < count
            _, layers = layers_of(part.stage.base, count)
            assert [isinstance(layer, Elsewhere) for layer in layers] == [index >= end for index in range(count)]
            assert {linear.layer for linear in part.linears} <= {*range(end), None}


@pytest.mark.parametrize(
    ("model_type", "heads"),
    [
        pytest.param("gpt2", (2, 2), marks=pytest.mark.slow),  # queries, keys and values in one matrix
        pytest.param("gpt_neox", (2, 2), marks=pytest.mark.slow),  # the same, head by head
        pytest.param("gpt_bigcode", (2, 1), marks=pytest.mark.slow),  # one KV head for all
        pytest.param("minimax_m2", (2, 1), marks=pytest.mark.slow),  # norms over all heads
        pytest.param("minicpm3", (2, 2), marks=pytest.mark.slow),  # latents
        pytest.param("bloom", (2, 2), marks=pytest.mark.slow),  # attention of its own
        pytest.param("gemma3n_text", (2, 1), marks=pytest.mark.slow),  # keys and values of other layers
        pytest.param("diffllama", (4, 2), marks=pytest.mark.slow),  # heads in pairs: attention is whole
    ],
)
def test_linears_and_heads_are_divided_whatever_they_are_called(
    model_type: str, heads: tuple[int, int], tmp_path: Path
) -> None:
    with threaded_engine(write_foreign(model_type, tmp_path), 2, 1) as engine:
        part: Any = engine.runner.decoder.stage.decoder  # type: ignore[attr-defined]
        found = {(site.heads.heads, site.heads.kv_heads) for site in part.hidden.sites}
        assert found == {heads}
        assert part.cuts.rows and part.cuts.columns
        for linear in part.linears:
            if linear.name in part.cuts.columns:
                assert linear.columns == (0, linear.in_features // 2)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(WHOLE))
def test_what_cannot_be_divided_is_whole_on_every_shard(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, prompt = write_foreign(model_type, tmp_path), prompt_of(random.Random(1), 30)
    with caplog.at_level("WARNING"), threaded_engine(folder, 2, 1) as engine:
        assert Reference(folder).agrees(prompt, generate(engine, greedy("r", prompt, 8))["r"])
    assert f"every shard has the linears of this {model_type} model whole" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [3, 4, 5])
@pytest.mark.parametrize("model_type", ["starcoder2", "bloom"])
def test_any_number_of_shards_gives_the_tokens(model_type: str, tensor: int, tmp_path: Path) -> None:
    """Four heads over two KV heads, and widths of 64 and 96: what a number does not divide is whole."""
    folder, prompt = write_foreign(model_type, tmp_path), prompt_of(random.Random(1), 50)
    with threaded_engine(folder, tensor, 1) as engine:
        assert Reference(folder).agrees(prompt, generate(engine, greedy("r", prompt, 8))["r"])
        assert_idle(engine)


@pytest.mark.parametrize(("fails_on", "tensor"), [(0, 2), (1, 2), (1, 1)])
@pytest.mark.parametrize("at", ["read_model", pytest.param("replace_linears", marks=pytest.mark.slow)])
def test_a_rank_that_cannot_load_is_the_reason(
    at: str, fails_on: int, tensor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others, which would wait for its sums, are told; not that the model does not run in parts."""
    folder, plain, leader = write_foreign("starcoder2", tmp_path), getattr(load, at), threading.current_thread()

    def fails(*arguments: Any, **options: Any) -> Any:
        if (threading.current_thread() is leader) is (fails_on == 0):
            raise CheckpointError("pretend that a file is bad")
        return plain(*arguments, **options)

    monkeypatch.setattr(load, at, fails)
    told = "rank 1 .*: " if fails_on else "^"
    with (
        pytest.raises((ConfigError, CheckpointError), match=f"{told}pretend that"),
        threaded_engine(folder, tensor, 3 - tensor),
    ):
        pass


def test_a_rank_that_fails_while_others_still_meet_is_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves as soon as it has met them: connections to it break under those that are slower."""
    folder, leader, left = write_foreign("starcoder2", tmp_path), threading.current_thread(), threading.Event()
    meet, leave = Groups.__init__, Groups.drop

    def met(groups: Groups, *arguments: Any) -> None:
        meet(groups, *arguments)
        if threading.current_thread() is leader:
            assert left.wait(100.0)
            raise RuntimeError("connection closed by peer")

    def dropped(groups: Groups) -> None:
        leave(groups)
        left.set()

    def fails(*arguments: Any, **options: Any) -> Any:
        raise CheckpointError("pretend that a file is bad")

    monkeypatch.setattr(Groups, "__init__", met)
    monkeypatch.setattr(Groups, "drop", dropped)
    monkeypatch.setattr(load, "read_model", fails)
    with pytest.raises(ConfigError, match=r"rank 1 .*: pretend that"), threaded_engine(folder, 2, 1):
        pass


@pytest.mark.parametrize("fits_not_on", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_all_shards_leave_the_engines_attention_where_one_does(
    fits_not_on: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three heads on two shards: feed-forwards are divided and summed, and nothing else has settled which attention."""
    folder = write_foreign("starcoder2", tmp_path, hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    check, leader, kinds = Comparison.check, threading.current_thread(), []

    def checked(comparison: Comparison, hidden: Any, *arguments: Any, **options: Any) -> None:
        check(comparison, hidden, *arguments, **options)
        kinds.append(type(hidden))
        if isinstance(hidden, PackedPass) and (threading.current_thread() is leader) is (fits_not_on == 0):
            raise CheckpointError("pretend that it differs")

    monkeypatch.setattr(Comparison, "check", checked)
    prompt = prompt_of(random.Random(1), 30)
    with threaded_engine(folder, 2, 1) as engine:
        part: Any = engine.runner.decoder.stage.decoder  # type: ignore[attr-defined]
        assert part.cuts.columns and not part.cuts.heads
        assert Reference(folder).agrees(prompt, generate(engine, greedy("r", prompt, 8))["r"])
    assert kinds == [PackedPass] * 2 + [SequencePass] * 2


@pytest.mark.slow
def test_a_model_is_not_read_again_beside_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, read, fits = write_foreign("starcoder2", tmp_path), load.read_model, load.first_that_fits
    first: dict[threading.Thread, weakref.ref[Any]] = {}
    alive, tried = [], set()

    def reads(*arguments: Any, **options: Any) -> Any:
        thread = threading.current_thread()
        if thread in first:
            alive.append(first[thread]() is not None)
        model = read(*arguments, **options)
        first.setdefault(thread, weakref.ref(model))
        return model

    def differs(*arguments: Any, **options: Any) -> Any:
        hidden, thread = fits(*arguments, **options), threading.current_thread()
        if thread not in tried:
            tried.add(thread)
            raise CheckpointError("pretend that it differs")
        return hidden

    monkeypatch.setattr(load, "read_model", reads)
    monkeypatch.setattr(load, "first_that_fits", differs)
    gc.disable()
    try:
        with threaded_engine(folder, 2, 1):
            assert alive == [False, False]
    finally:
        gc.enable()


class _Halves(nn.Module):
    """Each of two linears feeds one half of the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.out(torch.cat((self.a(hidden_states), self.b(hidden_states)), -1))
        return out


def test_no_shard_is_left_without_rows() -> None:
    cuts = LayerProbe(_Halves(), (torch.randn(1, 5, 8),), {}, 2).cuts()
    assert all(bool(needed.any(0).all()) for needed in cuts.rows.values())


class _ReadsIds(nn.Module):
    """Two layers, of which the second reads what tokens they are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(2))

    def forward(self, input_ids: Tensor, use_cache: bool) -> Any:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(last_hidden_state=hidden * (1 + input_ids.unsqueeze(-1)))


def test_layers_that_read_ids_have_no_stages() -> None:
    base, junction = _ReadsIds(), Junction((1, 2), 2)
    base.layers[0] = Elsewhere(base.layers[0], 0, junction)
    base.embed_tokens = NoEmbedding(4, torch.float32)  # type: ignore[assignment]
    body = StageBody(base, junction, 4, torch.float32)
    with pytest.raises(CannotDivide, match="read the tokens too"):
        body.find_form(torch.randn(3, 4))


class _WritesInPlace(nn.Module):
    """Scales what it is given, as CTRL does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(9, 4)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(2))

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def forward(self, inputs_embeds: Tensor, use_cache: bool) -> Any:
        hidden = inputs_embeds.mul_(2)
        for layer in self.layers:
            hidden = layer(hidden)
        return SimpleNamespace(last_hidden_state=hidden)


@torch.inference_mode()
def test_a_stage_may_write_into_what_it_is_given() -> None:
    base, junction = _WritesInPlace(), Junction((0, 1), 2)
    base.layers[1] = Elsewhere(base.layers[1], 1, junction)
    body = StageBody(base, junction, 4, torch.float32)
    entry = torch.randn(3, 4)
    kept = entry.clone()
    assert torch.equal(body(entry, use_cache=False), kept * 2) and torch.equal(entry, kept)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (2, 2)])
def test_adapters_speculation_and_the_host_tier(tensor: int, pipeline: int, tmp_path: Path) -> None:
    base = write_foreign("starcoder2", tmp_path / "base")
    adapter, folder = write_lora(tmp_path, base, ("q_proj", "o_proj", "c_fc"))
    merged, plain = Reference(folder), Reference(base)
    rng = random.Random(2)
    asked = {f"r{i}": (prompt_of(rng, 9 + 13 * i), "tuned" if i % 2 else "") for i in range(6)}
    settings = {"speculation": "ngram", "host_memory": 1 << 20, "num_blocks": 24, "token_budget": 40}
    with threaded_engine(base, tensor, pipeline, adapters=(AdapterSpec("tuned", str(adapter)),), **settings) as engine:
        for turn in range(2):
            got = generate(engine, *(
                Request(f"{name}-{turn}", prompt, SamplingParams(max_tokens=10, temperature=0.0), adapter=chosen)
                for name, (prompt, chosen) in asked.items()
            ))  # fmt: skip
            for name, (prompt, chosen) in asked.items():
                assert (merged if chosen else plain).agrees(prompt, got[f"{name}-{turn}"], 2e-2), name
        assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1)])
def test_few_bit_checkpoints(tensor: int, pipeline: int, tmp_path: Path) -> None:
    dense = write_foreign("starcoder2", tmp_path / "dense")
    few, same, _ = write(dense, "gptq", tmp_path / "stored", is_linear=is_linear)
    reference = Reference(same)
    with threaded_engine(few, tensor, pipeline) as engine:
        outputs = generate(engine, *(greedy(str(i), prompt, 12) for i, prompt in enumerate(PROMPTS)))
        for i, prompt in enumerate(PROMPTS):
            assert reference.agrees(prompt, outputs[str(i)], tie=0.02)
        assert_idle(engine)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pipeline_parallel": 4}, "pipeline_parallel: 4 is more than the 3 layers"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    tensor, pipeline = settings.pop("tensor_parallel", 1), settings.pop("pipeline_parallel", 1)
    folder = write_foreign("starcoder2", tmp_path)
    with pytest.raises(ConfigError, match=reason), threaded_engine(folder, tensor, pipeline, **settings):
        pass
