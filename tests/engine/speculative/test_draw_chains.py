"""Several draft tokens in one captured launch: the same drafts as step by step, for any number of tokens per sequence.

Without a GPU: a "captured" chain is one that is called again, on the reference backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine.backends import cpu
from penstock.engine.backends.cuda import decode_graphs, draw_chains, prompt_graphs
from penstock.engine.backends.cuda.draw_chains import DrawChains
from penstock.engine.backends.cuda.graphs import GraphExecutor
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sequence import Sequence
from penstock.engine.sleep.offload import offload
from tests.engine.harness import assert_idle, generate, greedy, make_engine
from tests.engine.parallel.test_captured_steps import record
from tests.engine.speculative.forced import eager_engine
from tests.engine.speculative.heads import PlainHead, noted_drafts, write_head
from tests.engine.tiny import write_checkpoint


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """How many tokens were drawn of each sequence, by launch."""
    found: list[tuple[int, ...]] = []
    replay = DrawChains.replay

    def noting(self: DrawChains, counts):  # type: ignore[no-untyped-def]
        found.append(tuple(counts.values()))
        return replay(self, counts)

    for module in (draw_chains, decode_graphs, prompt_graphs):
        monkeypatch.setattr(module, "record", record)
    monkeypatch.setattr(cpu, "load", lambda threads: None)
    monkeypatch.setattr(prompt_graphs, "TOKENS", (16,))
    monkeypatch.setattr(prompt_graphs, "TOKENS_BESIDE_DECODES", (32,))
    monkeypatch.setattr(DrawChains, "replay", noting)
    monkeypatch.setattr(ReferenceBackend, "executor", lambda self, resources: GraphExecutor(resources))
    return found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("target"), spread=0.3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head("original", tmp_path_factory.mktemp("head"))


def drafting(target: Path, head: Path, depth: int = 4) -> Engine:
    return eager_engine(
        target, speculation="eagle3", draft_model=str(head), speculation_depth=depth, max_running=4, max_model_len=256
    )


PROMPT = [i * 7 % 199 for i in range(100)]


def test_chains_draw_what_a_plain_implementation_does(
    target: Path, head: Path, replayed: list[tuple[int, ...]]
) -> None:
    engine = drafting(target, head)
    drafts = noted_drafts(engine)
    speculation = engine.speculation
    assert speculation is not None

    def by_turns(decoding: list[Sequence]) -> dict[Sequence, int]:
        room = {seq: seq.params.max_tokens - seq.output_len - 1 for seq in decoding}
        return {seq: min(1 + seq.length % 4, most) for seq, most in room.items() if most > 0}

    speculation.plan = by_turns  # type: ignore[method-assign]
    requests = [greedy("a", PROMPT, 20), greedy("b", [5, 4], 13), greedy("c", PROMPT[:70], 8)]
    assert generate(engine, *requests) == generate(make_engine(target), *requests)
    reference = PlainHead(head, target)
    assert len(drafts) > 10
    for tokens, draft in drafts:
        assert draft == reference.draft(tokens, len(draft)), tokens
    assert any(len(set(counts)) > 1 for counts in replayed), "no launch drew different numbers"
    assert_idle(engine)


def test_draws_follow_seeds_and_temperatures_and_leave_filters_to_steps(
    target: Path, head: Path, replayed: list[tuple[int, ...]]
) -> None:
    plain, engine = make_engine(target), drafting(target, head)
    drawn = SamplingParams(max_tokens=16, temperature=0.7, seed=3)
    assert generate(engine, Request("a", PROMPT, drawn)) == generate(plain, Request("a", PROMPT, drawn))
    assert replayed
    replayed.clear()
    filtered = SamplingParams(max_tokens=16, temperature=0.7, seed=3, top_k=5)
    assert generate(engine, Request("b", PROMPT, filtered)) == generate(plain, Request("b", PROMPT, filtered))
    assert engine.load_snapshot().draft_tokens > 0 and not replayed


@pytest.mark.slow
def test_chains_come_back_after_sleep(target: Path, head: Path, replayed: list[tuple[int, ...]]) -> None:
    engine = drafting(target, head)
    before = generate(engine, greedy("a", PROMPT, 16))
    offload(engine).restore()
    launches = len(replayed)
    assert generate(engine, greedy("b", PROMPT, 16))["b"] == before["a"]
    assert len(replayed) > launches
