"""What an engine remembers of the tokens it produced: exact, by charge, and bounded."""

from __future__ import annotations

import dataclasses
from typing import Any

from penstock.engine.request import Delta, Request, SamplingParams, TokenLogprob
from penstock.engine_host.tally import MOST_CLAIMS, Tally
from penstock.metering.engine_counts import engine_id, usage_of
from penstock.metering.prices import Usage
from penstock.protocol.messages import Abort, Claimed, Count, Counted, Goodbye, Produced
from tests.engine_host.client import Client, connected, eventually, serving
from tests.engine_host.scripted import ScriptedEngine


def test_deltas_add_up_by_charge_until_the_last_one() -> None:
    tally = Tally()
    for id in ("c:0.0.1", "c:0.1.2", "d:0.0.3"):
        tally.begin(id)
    tally.add([Delta("c:0.0.1", [1, 2], cached_tokens=16), Delta("c:0.1.2", [1]), Delta("d:0.0.3", [1])])
    tally.add([Delta("c:0.0.1", [3], "length"), Delta("c:0.0.1", [4]), Delta("never", [1])])
    assert tally.of(["c", "unknown"]) == [Produced("c:0.0.1", 3, 16, "length"), Produced("c:0.1.2", 1)]
    tally.begin("c:0.0.1")  # the same id again is another request
    assert tally.of(["c"])[-1] == Produced("c:0.0.1")


def test_what_ended_is_forgotten_by_age_and_by_number() -> None:
    now = 0.0
    tally = Tally(keep_s=10.0, most=3, clock=lambda: now)
    for number in range(5):
        tally.begin(f"{number}:a")
        tally.add([Delta(f"{number}:a", [1], "stop")])
    assert [entry.request_id for entry in tally.of("01234")] == ["2:a", "3:a", "4:a"]
    tally.begin("running:a")
    now = 11.0
    for number in (7, 8):
        tally.begin(f"{number}:a")
        tally.add([Delta(f"{number}:a", [1], "stop")])
    assert [entry.request_id for entry in tally.of(["2", "3", "4", "7", "8", "running"])] == ["7:a", "8:a", "running:a"]
    assert len(tally._groups) == 3


def test_a_charge_s_tokens_come_from_all_its_choices_and_its_cache_from_the_first_of_each_prompt() -> None:
    entries = [Produced(engine_id("c", prompt, choice), 10, 4) for prompt in range(2) for choice in range(2)]
    assert usage_of(entries) == Usage(0, 8, 40)
    only_prompt = Produced(engine_id("c", 0, 0, counted=False), 1, 4)
    assert usage_of([only_prompt]) == Usage(0, 4, 0)


def ask(client: Client, *charges: str) -> list[Produced]:
    client.send(Count("q", list(charges)))
    while True:
        message = client.receive()
        assert message is not None
        if isinstance(message, Counted):
            return message.entries


def test_another_gateway_learns_what_one_that_vanished_had_produced() -> None:
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running, connected(running.endpoint) as heir:
        heir.hello()
        with connected(running.endpoint) as dead:
            dead.hello()
            dead.submit("c:0.0.0", tokens=10**9)
            dead.submit("d:0.0.1", tokens=3)
            dead.finish("d:0.0.1")
        assert eventually(lambda: engine.aborted == ["c:0.0.0"])  # nobody pays for what nobody reads
        made = running.server._engine.steps
        (cut,) = ask(heir, "c")
        assert cut.finish_reason == "abort" and 3 <= cut.tokens <= made
        assert ask(heir, "d", "e") == [Produced("d:0.0.1", 3, 0, "length")]


def test_a_request_that_was_aborted_or_left_behind_is_counted_to_its_end() -> None:
    engine = ScriptedEngine(step_s=0.005)
    with serving(engine) as running, connected(running.endpoint) as client, connected(running.endpoint) as other:
        client.hello()
        other.hello()
        client.submit("a:0.0.0", tokens=10**9)
        other.submit("b:0.0.0", tokens=10**9)
        assert eventually(lambda: len(engine.running) == 2)
        assert ask(client, "b")[0].finish_reason is None
        client.send(Abort("a:0.0.0"))
        tokens, _ = client.finish("a:0.0.0")
        (aborted,) = ask(client, "a")
        assert len(tokens) <= aborted.tokens and aborted.finish_reason == "abort"
        other.send(Goodbye())
        assert eventually(lambda: ask(client, "b")[0].finish_reason == "abort")


def resumable(**changes: Any) -> Request:
    given: dict[str, Any] = {
        "prompt": [7, 8],
        "params": SamplingParams(seed=5),
        "owner": "acme",
        "resumable_by": "acme",
        **changes,
    }
    return Request("c:0.0.1", **given)


def test_a_broken_stream_is_claimed_by_the_same_request_only() -> None:
    now = 0.0
    tally = Tally(clock=lambda: now)
    tally.begin("c:0.0.1", request=resumable())
    tally.add([Delta("c:0.0.1", [1, 2], cached_tokens=1)])
    again = resumable(params=SamplingParams(seed=99))
    assert tally.claim("q", "c", again) == Claimed("q", running=True, request_id="c:0.0.1")
    tally.broken_off("c:0.0.1")
    tally.add([Delta("c:0.0.1", [3], "abort")])
    for other in (
        resumable(prompt=[7, 9]),
        resumable(resumable_by="other"),
        resumable(params=SamplingParams(max_tokens=99)),
        resumable(cache_salt="x"),
        resumable(adapter="x"),
    ):
        assert tally.claim("q", "c", other) == Claimed("q")
    assert tally.claim("q", "d", again) == Claimed("q")
    assert tally.of(["c"])[0].resumable, "its charge waits for the client"
    assert tally.claim("q", "c", again) == Claimed(
        "q", found=True, request_id="c:0.0.1", seed=5, tokens=[1, 2, 3], cached_tokens=1
    )
    now = 10.5
    assert tally.claim("q", "c", again) == Claimed("q") and not tally.of(["c"])[0].resumable


def test_what_its_own_gateway_ended_is_not_resumed_and_what_has_ended_is_sent_again() -> None:
    tally = Tally()
    tally.begin("c:0.0.1", request=resumable())
    tally.add([Delta("c:0.0.1", [1], "abort")])
    assert not tally.claim("q", "c", resumable()).found
    tally.begin("c:0.0.1", request=resumable())
    tally.add([Delta("c:0.0.1", [1], "length")])
    assert tally.claim("q", "c", resumable()).finish_reason == "length"
    tally.release("c:0.0.1")
    assert not tally.claim("q", "c", resumable()).found


def test_the_tokens_of_resumable_requests_are_bounded() -> None:
    tally = Tally(most_kept=10)
    for number in range(4):
        tally.begin(f"{number}:0.0.1", request=resumable())
        tally.add([Delta(f"{number}:0.0.1", [1, 2], "stop")])
    assert [tally.claim("q", str(number), resumable()).found for number in range(4)] == [False, False, True, True]


def test_log_probabilities_are_kept_across_claims_which_are_bounded() -> None:
    tally = Tally()
    request = resumable(params=SamplingParams(seed=5, logprobs=0))
    tally.begin("c:0.0.1", request=request)
    for claims in range(MOST_CLAIMS):
        tally.add([Delta("c:0.0.1", [claims], logprobs=[TokenLogprob(-0.5)])])
        tally.broken_off("c:0.0.1")
        tally.add([Delta("c:0.0.1", finish_reason="abort")])
        claimed = tally.claim("q", "c", request)
        assert len(claimed.tokens) == len(claimed.logprobs or ()) == claims + 1
        tally.begin("c:0.0.1", request=dataclasses.replace(request, produced=claimed.tokens))
    tally.broken_off("c:0.0.1")
    tally.add([Delta("c:0.0.1", finish_reason="abort")])
    assert not tally.claim("q", "c", request).found
    tally.begin("d:0.0.1", request=dataclasses.replace(request, request_id="d:0.0.1", produced=[1]))
    assert not tally.claim("q", "d", request).running, "another engine has the log-probabilities of its first token"
