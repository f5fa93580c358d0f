"""Specs and the engine requests they make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from penstock.engine.request import Delta, SamplingParams
from penstock.gateway.generation.assistant_message import AssistantMessage
from penstock.gateway.generation.choice import CallPiece, Piece
from penstock.gateway.generation.replay import EVENT_TOKENS, AnswerRecord, replayed
from penstock.gateway.generation.sampling import choice_params
from penstock.gateway.generation.spec import GenerationSpec, TokenPrompt, internal_spec
from penstock.identity.labels import NO_DEMAND
from penstock.metering.engine_counts import usage_of
from penstock.protocol.messages import Produced
from penstock.routing.placement import ANYWHERE
from penstock.routing.registry import ServedModel

MODEL = cast(
    ServedModel,
    SimpleNamespace(
        adapter="de", reasoning="off", text=SimpleNamespace(template_source=""), place=lambda facts: ANYWHERE
    ),
)


def test_a_spec_makes_one_engine_request_per_choice() -> None:
    params = choice_params(SamplingParams(max_tokens=4, seed=7), 2)
    spec = GenerationSpec(
        id="a", model=MODEL, prompts=[TokenPrompt([1], params), TokenPrompt([2, 3], params)], started_at=0.0, priority=2
    )
    requests = spec.requests()
    assert [request.prompt for request in requests] == [[1], [1], [2, 3], [2, 3]]
    assert [request.params.seed for request in requests] == [7, 8, 7, 8]
    assert {request.adapter for request in requests} == {"de"} and {request.priority for request in requests} == {2}
    assert len({request.request_id for request in requests}) == 4


def test_tokens_of_an_uncounted_question_belong_to_no_charge() -> None:
    def completion_tokens(counted: bool) -> int:
        spec = internal_spec(
            "a", MODEL, [1], [SamplingParams(max_tokens=4)], started_at=0.0, priority=0, cache_salt="",
            time_limit_s=None, caller=("t", "standard"), demand=NO_DEMAND,
            counted=counted,
        )  # fmt: skip
        (request,) = spec.requests()
        return usage_of([Produced(request.request_id, 4, 0, "stop")]).completion

    assert (completion_tokens(True), completion_tokens(False)) == (4, 0)


def test_a_recorded_answer_is_replayed_in_parts_that_add_up_to_it() -> None:
    record = AnswerRecord(2)
    for token in range(EVENT_TOKENS + 5):
        record.add(0, Delta("x", [token]))
    record.add(0, Delta("x", [99], finish_reason="stop"))
    record.add(1, Delta("y", [1, 2], finish_reason="length"))
    again = AnswerRecord(2)
    parts = list(replayed(record.deltas))
    for index, delta in parts:
        again.add(index, delta)
    assert [index for index, _ in parts] == [0, 1, 0], "choices alternate"
    assert [(delta.tokens, delta.finish_reason) for delta in again.deltas] == [
        ([*range(EVENT_TOKENS + 5), 99], "stop"),
        ([1, 2], "length"),
    ]


def test_pieces_of_text_and_calls_become_one_message() -> None:
    message = AssistantMessage()
    message.add(Piece(0, text="Let me "))
    message.add(Piece(0, text="see.", calls=[CallPiece(0, "call_1", "look", ""), CallPiece(0, None, None, '{"a":')]))
    calls = [CallPiece(0, None, None, "1}"), CallPiece(1, "call_2", "ask", "")]
    message.add(Piece(0, calls=calls, finish_reason="tool_calls"))
    assert message.finish_reason == "tool_calls"
    assert message.body() == {
        "role": "assistant",
        "content": "Let me see.",
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"a":1}'}},
            {"id": "call_2", "type": "function", "function": {"name": "ask", "arguments": ""}},
        ],
    }
