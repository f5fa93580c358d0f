"""Messages cross the wire unchanged, and what is not a message is refused, not half-read."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.request import Delta, EngineInfo, EngineLoad, Request, SamplingParams, StepOutput, TokenLogprob
from penstock.protocol import messages as m
from penstock.protocol.codec import ProtocolError, decode_from_engine, decode_to_engine, encode

requests = st.builds(
    Request,
    request_id=st.text(max_size=40),
    prompt=st.lists(st.integers(0, 200_000), max_size=50),
    params=st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 4096),
        temperature=st.floats(0, 2),
        logit_bias=st.dictionaries(st.integers(0, 50_000), st.floats(-100, 100), max_size=5),
        seed=st.integers(-(2**63), 2**63 - 1),
        stop_token_ids=st.lists(st.integers(0, 50_000), max_size=4).map(tuple),
        logprobs=st.none() | st.integers(0, 20),
    ),
    priority=st.integers(-10, 10),
    timeout_s=st.none() | st.floats(0, 100),
    cache_salt=st.text(max_size=8),
)
logprobs = st.builds(TokenLogprob, logprob=st.floats(-50, 0), top_ids=st.lists(st.integers(0, 9), max_size=3))
deltas = st.builds(
    Delta,
    request_id=st.text(max_size=40),
    tokens=st.lists(st.integers(0, 200_000), max_size=8),
    finish_reason=st.sampled_from([None, "stop", "length", "abort", "timeout", "error"]),
    logprobs=st.none() | st.lists(logprobs, max_size=3),
    prompt_logprobs=st.none() | st.lists(st.none() | logprobs, max_size=3),
    cached_tokens=st.none() | st.integers(0, 9),
)


@given(st.one_of(st.builds(m.Submit, requests), st.builds(m.Hello, st.text()), st.builds(m.Abort, st.text())))
@settings(max_examples=60)
def test_what_a_gateway_says_arrives_unchanged(message: m.ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


@given(st.builds(m.Step, st.builds(StepOutput, st.lists(deltas, max_size=4), st.builds(EngineLoad, st.integers(0, 9)))))
@settings(max_examples=60)
def test_what_an_engine_says_arrives_unchanged(message: m.FromEngine) -> None:
    assert decode_from_engine(encode(message)) == message


@pytest.mark.parametrize("message", [m.Goodbye(), m.Drain(), m.Shutdown()])
def test_control_messages_arrive(message: m.ToEngine) -> None:
    assert decode_to_engine(encode(message)) == message


def test_ready_and_stopped_arrive() -> None:
    info = EngineInfo("m", "i", 2048, 49152, 16, 100, 64, "cpu", "float32", {"weights": 0.5})
    assert decode_from_engine(encode(m.Ready(info))) == m.Ready(info)
    assert decode_from_engine(encode(m.Stopped("why"))) == m.Stopped("why")


@given(st.binary(max_size=200))
def test_noise_is_refused_with_one_kind_of_error(noise: bytes) -> None:
    for decode in (decode_to_engine, decode_from_engine):
        try:
            decode(noise)
        except ProtocolError:
            continue
        pytest.fail("noise was taken for a message")


@pytest.mark.parametrize(
    "body",
    [
        {"type": "submit"},
        {"type": "submit", "request": {"request_id": "a", "prompt": "text", "params": {}}},
        {"type": "submit", "request": {"request_id": 7, "prompt": [], "params": {}}},
        {"type": "explode"},
        {"type": "step", "output": {"deltas": [], "load": {}}},
        [1, 2, 3],
    ],
)
def test_a_message_with_a_wrong_field_is_refused(body: object) -> None:
    with pytest.raises(ProtocolError):
        decode_to_engine(msgspec.msgpack.encode(body))


def test_deep_nesting_does_not_overflow_the_stack() -> None:
    with pytest.raises(ProtocolError):
        decode_to_engine(b"\x91" * 100_000)
