"""Steps in flight share evenly what there is to compute, and a row stays taken while one of them needs it."""

from __future__ import annotations

from penstock.engine.batch import Batch, Chunk
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sequence import Sequence
from penstock.engine.turns import LEAST_BESIDE_DECODES, LEAST_SHARE, Turns


def running(name: str, row: int, pending: int = 0) -> Sequence:
    seq = Sequence(Request(name, [1, 2, 3], SamplingParams(max_tokens=9)), 0.0, (0.0, row))
    seq.row, seq.pending = row, pending
    return seq


def prompt_of(seq: Sequence, tokens: int, samples: bool = True) -> Batch:
    return Batch.of([Chunk(seq, 0, tokens, samples)])


def test_decodes_are_divided_between_the_steps_that_may_be_in_flight() -> None:
    turns = Turns(3)
    assert turns.decodes(7, 7) == 3, "a third of all, rounded up"
    turns.scheduled(prompt_of(running("a", 0), 9))
    assert turns.decodes(7, 4) == 2, "two more steps may join the one in flight"
    for name in "bc":
        turns.scheduled(prompt_of(running(name, 1), 9))
    assert turns.decodes(7, 1) == 1, "the pipeline is full, but what is ready may run"


def test_prompts_are_divided_but_not_into_slivers() -> None:
    turns = Turns(2)
    assert turns.prompt_share(1001, decodes=0) == 501
    first = Batch.of([Chunk(running("a", 0), 0, 1000, True), Chunk(running("b", 1), 7, 1, True)])
    turns.scheduled(first)
    assert turns.prompt_share(1001, decodes=0) == 1001, "prompts in flight are shared as well; a decode is none"
    turns.landed(first)
    assert turns.prompt_tokens == 0
    assert turns.prompt_share(1, decodes=0) == LEAST_SHARE
    assert turns.prompt_share(1, decodes=1) == LEAST_BESIDE_DECODES


def test_a_row_is_free_when_the_step_that_samples_for_it_has_landed() -> None:
    turns = Turns(2)
    stopped, other = running("a", 4, pending=1), running("b", 5)
    assert turns.parks(stopped) and not turns.parks(other), "nothing is in flight for the other"
    assert not Turns(1).parks(stopped), "without turns a step knows its rows itself"
    steps = [prompt_of(other, 2), prompt_of(stopped, 3, samples=False), prompt_of(stopped, 3)]
    for step in steps:
        turns.scheduled(step)
    assert [turns.landed(step) for step in steps] == [[], [], [4]]
    assert turns.in_flight == turns.prompt_tokens == 0


def test_what_is_lost_frees_its_rows_and_counts_no_more() -> None:
    turns = Turns(2)
    stopped = running("a", 4, pending=1)
    step = prompt_of(stopped, 300)
    turns.scheduled(step)
    assert turns.parks(stopped)
    assert turns.start_over() == [4]
    assert turns.in_flight == turns.prompt_tokens == 0
    turns.scheduled(step)
    assert turns.landed(step) == [], "its row was given back before"
