"""Prompts handed over from and to shards that have sequences of their own (R-ENG-11): blocks leave the shard that has
them and come to the one that will go on, and the answer is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.core import Engine
from penstock.engine.kv.partition import PartitionedAllocator
from penstock.engine.parallel import blocks
from tests.engine.harness import assert_idle, carry, collect, drain, generate, greedy, make_engine
from tests.engine.parallel.threads import threaded_engine
from tests.engine.speculative.forced import verify_everything
from tests.engine.speculative.heads import noted_drafts
from tests.engine.speculative.mtp_layers import PlainMtp, write_mtp
from tests.engine.speculative.plain_mtp import PLAIN
from tests.engine.tiny import write_checkpoint

DATA: dict[str, Any] = {"expert_parallel": True, "attention_parallel": "data", "expert_rebalance_s": 0.0}
Grid = tuple[int, int, dict[str, Any]]
ONE: Grid = (1, 1, {})
BY_HEADS: Grid = (2, 1, {})
BY_SEQUENCES: Grid = (2, 1, DATA)
STAGES: Grid = (2, 2, DATA)
THREE: Grid = (3, 1, DATA)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folders[family] = write_checkpoint(family, tmp_path_factory.mktemp(family), spread=0.3)
        return folders[family]

    return find


def text(number: int, length: int = 100) -> list[int]:
    return [(number * 31 + 7 * i * i + 3 * i) % 190 for i in range(length)]


def caches(engine: Engine) -> int:
    allocator = engine.scheduler.allocator
    return len(allocator.parts) if isinstance(allocator, PartitionedAllocator) else 1


def check(
    folder: Path,
    giving: Grid,
    taking: Grid,
    prompts: int = 4,
    watch: Callable[[Engine], None] = lambda taker: None,
    **settings: Any,
) -> None:
    """Hand over some prompts, and go on with all of them at once. `watch`: called before."""
    expected = generate(make_engine(folder), *(greedy(f"{i}", text(i), 8) for i in range(prompts)))
    with ExitStack() as stack:

        def open_(role: str, grid: Grid) -> Engine:
            tensor, pipeline, own = grid
            if (tensor, pipeline) == (1, 1):
                return make_engine(folder, role=role, **settings)
            return stack.enter_context(threaded_engine(folder, tensor, pipeline, role=role, **own, **settings))

        giver, taker = open_("prefill", giving), open_("decode", taking)
        assert giver.info.kv_format == taker.info.kv_format != ""
        for engine in (giver, taker):
            if engine.speculation is not None:
                verify_everything(engine.speculation)
        here, there = giver.exchange, taker.exchange
        assert here is not None and there is not None
        used = set()
        generate(giver, *(greedy(f"p{i}", text(i), 1) for i in range(prompts)))
        for i in range(prompts):
            names = there.names(greedy("", text(i), 8))
            cache = there.choose(names)
            usable, lacking = there.missing(names, cache)
            assert usable == 0 and all(map(here.has, lacking))
            there.release(carry(giver, taker, lacking, cache))
            assert there.missing(names, cache) == (6, [])
            assert there.choose(names) == cache, "it has all of it now"
            used.add(cache)
        assert len(used) == min(caches(taker), prompts)
        assert there.counts.blocks_in == 6 * prompts
        watch(taker)
        for i in range(prompts):
            taker.submit(greedy(f"{i}", text(i), 8))
        deltas = drain(taker)
        assert collect(deltas) == expected
        first = {delta.request_id: delta.cached_tokens for delta in deltas if delta.cached_tokens is not None}
        assert first == {f"{i}": 96 for i in range(prompts)}
        for engine in (giver, taker):
            assert_idle(engine)


@pytest.mark.parametrize(
    ("giving", "taking"),
    [
        (BY_SEQUENCES, BY_SEQUENCES),
        pytest.param(BY_SEQUENCES, ONE, marks=slow),
        pytest.param(ONE, BY_SEQUENCES, marks=slow),
        pytest.param(BY_HEADS, THREE, marks=slow),
        pytest.param(THREE, STAGES, marks=slow),
        pytest.param(STAGES, BY_HEADS, marks=slow),
    ],
)
def test_prompts_are_continued_on_other_shards(folder_of: Callable[[str], Path], giving: Grid, taking: Grid) -> None:
    check(folder_of("qwen3-moe"), giving, taking)


@slow
@pytest.mark.parametrize(
    "settings", [{"kv_dtype": "int8"}, {"host_memory": 1 << 22}, {"speculation": "ngram"}], ids=str
)
def test_with_other_settings(folder_of: Callable[[str], Path], settings: dict[str, Any]) -> None:
    check(folder_of("qwen3-moe"), BY_SEQUENCES, STAGES, **settings)


@slow
@pytest.mark.parametrize("family", ["qwen3-next", "deepseek-v3", "qwen4-exp", "deepseek-v4", "glm5-next"])
@pytest.mark.parametrize(("giving", "taking"), [(BY_SEQUENCES, BY_SEQUENCES), (ONE, STAGES), (STAGES, ONE)])
def test_states_latents_and_entries(folder_of: Callable[[str], Path], family: str, giving: Grid, taking: Grid) -> None:
    check(folder_of(family), giving, taking)


@slow
def test_ranks_that_share_no_memory_send_their_parts(
    folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "open_shared", lambda *_: None)
    check(folder_of("qwen3-moe"), BY_SEQUENCES, STAGES)


@slow
@pytest.mark.parametrize(
    ("giving", "taking"),
    [(BY_HEADS, BY_SEQUENCES), (BY_SEQUENCES, BY_SEQUENCES), (ONE, BY_HEADS), (STAGES, ONE), (ONE, STAGES)],
)
def test_what_a_drafter_reads_comes_along(tmp_path: Path, giving: Grid, taking: Grid) -> None:
    """An MTP layer drafts behind a prompt that was handed over as well as behind one that was computed here."""
    folder = write_mtp("glm4-moe", tmp_path)
    drafts: list[Any] = []
    check(folder, giving, taking, watch=lambda taker: drafts.append(noted_drafts(taker)), speculation="mtp")
    reference = PlainMtp(folder)
    right = [draft == reference.draft(tokens, len(draft)) for tokens, draft in drafts[0]]
    assert len(right) > 10 and all(right), right


@slow
@pytest.mark.parametrize("family", PLAIN)
@pytest.mark.parametrize(("giving", "taking"), [(BY_SEQUENCES, BY_SEQUENCES), (STAGES, ONE), (ONE, STAGES)])
def test_of_layers_that_no_library_has_too(tmp_path: Path, family: str, giving: Grid, taking: Grid) -> None:
    folder, drafts = PLAIN[family].write(family, tmp_path), []
    check(folder, giving, taking, watch=lambda taker: drafts.append(noted_drafts(taker)), speculation="mtp")
    layer = PLAIN[family](folder)
    assert len(drafts[0]) > 8
    for tokens, draft in drafts[0]:
        assert layer.scores(tokens, draft).argmax(-1).tolist() == draft
