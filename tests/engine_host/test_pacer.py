"""Where an engine shares its cores, a crowd's tokens go out together; nobody's first or last word waits for that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.request import Delta, TokenLogprob
from penstock.engine_host.pacer import CPU_INTERVAL_S, CROWD, Pacing, pick_interval
from penstock.protocol.messages import Step
from tests.engine_host.client import connected, eventually, serving
from tests.engine_host.scripted import ScriptedEngine


def test_tokens_of_a_crowd_wait_for_the_next_delivery_and_stay_in_order() -> None:
    pacing = Pacing(1.0)
    assert [d.tokens for d in pacing.due([Delta("a", [1])], CROWD, 10.0)] == [[1]]
    assert pacing.due([Delta("a", [2], logprobs=[TokenLogprob(-2.0)])], CROWD, 10.3) == []
    assert pacing.due([Delta("b", [7])], CROWD, 10.6) == []
    due = pacing.due([Delta("a", [3], logprobs=[TokenLogprob(-3.0)])], CROWD, 11.0)
    assert [(d.request_id, d.tokens) for d in due] == [("a", [2, 3]), ("b", [7])]
    assert due[0].logprobs == [TokenLogprob(-2.0), TokenLogprob(-3.0)]


def test_first_and_last_words_never_wait() -> None:
    pacing = Pacing(1.0)
    pacing.due([], CROWD, 10.0)
    assert pacing.due([Delta("a", [1]), Delta("b", [5])], CROWD, 10.1) == []
    (first,) = pacing.due([Delta("c", [9], cached_tokens=0)], CROWD, 10.2)
    assert (first.request_id, first.tokens) == ("c", [9])
    (last,) = pacing.due([Delta("a", [2], "length", decode_s=0.5)], CROWD, 10.3)
    assert (last.tokens, last.finish_reason, last.decode_s) == ([1, 2], "length", 0.5)
    assert [d.request_id for d in pacing.rest()] == ["b"]
    assert pacing.rest() == []


def test_a_few_requests_get_every_step_and_so_does_everybody_without_an_interval() -> None:
    pacing = Pacing(1.0)
    pacing.due([], CROWD, 10.0)
    assert pacing.due([Delta("a", [1])], CROWD, 10.1) == []
    assert [d.tokens for d in pacing.due([Delta("a", [2])], CROWD - 1, 10.2)] == [[1, 2]]
    assert [d.tokens for d in pacing.due([Delta("a", [3])], CROWD - 1, 10.3)] == [[3]]
    step = [Delta("a", [1])]
    assert Pacing().due(step, 1000, 10.0) is step


def test_an_engine_on_a_gpu_delivers_every_step_unless_told_otherwise() -> None:
    assert pick_interval(None, "cpu") == CPU_INTERVAL_S
    assert pick_interval(None, "cuda:0") == 0.0
    assert (pick_interval(0.0, "cpu"), pick_interval(0.1, "cuda:0")) == (0.0, 0.1)


STEPS = st.lists(
    st.tuples(st.lists(st.integers(0, 11), unique=True), st.integers(0, 2 * CROWD), st.floats(0, 0.5), st.booleans()),
    max_size=40,
)


@given(STEPS)
def test_no_token_is_lost_or_out_of_order(steps: list[tuple[list[int], int, float, bool]]) -> None:
    pacing, now = Pacing(1.0), 0.0
    made: dict[str, list[int]] = {}
    heard: dict[str, list[int]] = {}
    for number, (requests, running, seconds, released) in enumerate(steps):
        now += seconds
        names = [str(request) for request in requests]
        due = pacing.due([Delta(name, [number]) for name in names], running, now)
        for name in names:
            made.setdefault(name, []).append(number)
        for delta in due + (pacing.rest() if released else []):
            heard.setdefault(delta.request_id, []).extend(delta.tokens)
    for delta in pacing.rest():
        heard.setdefault(delta.request_id, []).extend(delta.tokens)
    assert heard == made


def test_a_paced_server_sends_fewer_messages_and_every_token() -> None:
    engine = ScriptedEngine()
    engine.paused = True
    with serving(engine, pacing=Pacing(1e6)) as running, connected(running.endpoint) as client:
        client.hello()
        for index in range(CROWD + 2):
            client.submit(f"r{index}", first=1000 * index, tokens=60)
        assert eventually(lambda: len(engine.running) == CROWD + 2)
        engine.paused = False
        tokens: dict[str, list[int]] = {}
        unfinished, messages = CROWD + 2, 0
        while unfinished:
            message = client.receive()
            assert message is not None
            if isinstance(message, Step) and message.output.deltas:
                messages += 1
                for delta in message.output.deltas:
                    tokens.setdefault(delta.request_id, []).extend(delta.tokens)
                    unfinished -= delta.finish_reason is not None
    assert tokens == {f"r{i}": list(range(1000 * i, 1000 * i + 60)) for i in range(CROWD + 2)}
    assert messages < engine.steps / 2
