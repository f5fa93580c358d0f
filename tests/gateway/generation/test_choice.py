"""What a choice says, how it ends and what it counts depends on its tokens, not on how they arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.guardrails import GuardrailConfig
from penstock.engine.request import Delta, TokenLogprob
from penstock.gateway.generation.call_guard import CallGuard
from penstock.gateway.generation.choice import Choice
from penstock.gateway.moderation.guardrails import OutputGuard, _compiled
from penstock.text import TextModel
from penstock.tools.channels import ChannelSplitter, ChannelTokens
from penstock.tools.formats import FORMATS
from penstock.tools.toolbox import Tool, Toolbox
from tests.text.test_thoughts import model
from tests.tools.test_channels import CONTROL

SAID = "Hello, wörld! 日本語 🎉 and 555-12-3456 then Hello again."


@dataclass
class Said:
    text: str = ""
    logprobs: list[int] = field(default_factory=list)
    end: tuple[str | None, str | int | None] = (None, None)
    tokens: int = 0


def say(choice: Choice, tokens: list[int], cuts: set[int], finish: str) -> Said:
    """Feed `tokens`, cut before each index in `cuts`, the last delta with the reason to finish."""
    said, start = Said(), 0
    for end in [*sorted(cuts), len(tokens)]:
        part = tokens[start:end]
        piece = choice.feed(
            Delta(
                "",
                part,
                finish if end == len(tokens) else None,  # type: ignore[arg-type]
                logprobs=[TokenLogprob(-float(start + at)) for at in range(len(part))],
            )
        )
        start = end
        if piece is not None:
            said.text += piece.text
            said.logprobs += [token.id for token in piece.tokens]
            if piece.finish_reason is not None:
                said.end = (piece.finish_reason, piece.stop_reason)
                break
    said.tokens = choice.completion_tokens
    return said


@given(
    cuts=st.sets(st.integers(1, 60)),
    stops=st.lists(st.sampled_from(["Hello", "o, w", "本", "🎉 a", "!", "nowhere"]), max_size=2),
    min_tokens=st.integers(0, 40),
    shape=st.sampled_from(["plain", "logprobs", "guarded"]),
    finish=st.sampled_from(["stop", "length", "complete"]),
)
def test_how_tokens_are_grouped_makes_no_difference(
    text: TextModel, cuts: set[int], stops: list[str], min_tokens: int, shape: str, finish: str
) -> None:
    tokens = text.encode(SAID) + ([text.eos_token_ids[0]] if finish == "stop" else [])

    def choice() -> Choice:
        made = Choice(0, text, stops=stops, min_tokens=min_tokens, want_logprobs=shape == "logprobs")
        if shape == "guarded":
            rule = _compiled(GuardrailConfig(name="number", patterns=("[0-9]{3}-[0-9]{2}-[0-9]{4}",)))
            made.guard = OutputGuard([rule], lambda rule, times: None)
        return made

    one_by_one = say(choice(), tokens, set(range(1, len(tokens))), finish)
    assert say(choice(), tokens, {cut for cut in cuts if cut < len(tokens)}, finish) == one_by_one
    assert one_by_one.end[0] is not None


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return model(tmp_path_factory.mktemp("channels"), *CONTROL, special=True)


@given(st.sets(st.integers(1, 60)), st.sampled_from(["refuse", "redact"]))
def test_rules_hold_for_calls_in_channels(channels: TextModel, cuts: set[int], action: str) -> None:
    said = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"to": "123-45-6789"}<|call|>'
    )
    tokens = channels.encode(said, add_special_tokens=False)
    marks = ChannelTokens(channels)
    splitter = ChannelSplitter(marks, {"f"})
    splitter.prepare(channels, channels.encode("<|start|>assistant", add_special_tokens=False))
    toolbox = Toolbox((Tool("f"),), FORMATS["hermes"])
    ends = marks.stops(channels.eos_token_ids)
    choice = Choice(0, channels, stops=[], splitter=splitter, toolbox=toolbox, ends=ends)
    rule = _compiled(
        GuardrailConfig(name="number", action=action, patterns=("[0-9]{3}-[0-9]{2}-[0-9]{4}",))  # type: ignore[arg-type]
    )
    choice.call_guard = CallGuard(lambda: OutputGuard([rule], lambda rule, times: None))
    arguments, ended, start = "", None, 0
    for cut in [*sorted(cut for cut in cuts if cut < len(tokens)), len(tokens)]:
        finish = "stop" if cut == len(tokens) else None
        if (piece := choice.feed(Delta("", tokens[start:cut], finish_reason=finish))) is not None:
            arguments += "".join(call.arguments for call in piece.calls or ())
            ended = piece.finish_reason
        start = cut
    if action == "redact":
        assert (arguments, ended) == ('{"to": "[redacted]"}', "tool_calls")
    else:
        assert (arguments, ended) == ('{"to": "', "content_filter")


def test_tokens_behind_a_stop_string_are_not_counted(text: TextModel) -> None:
    choice = Choice(0, text, stops=["wor"])
    piece = choice.feed(Delta("", text.encode("Hello, world! and more")))
    assert piece is not None and (piece.text, piece.stop_reason) == ("Hello, ", "wor")
    assert choice.completion_tokens == len("Hello, wor")


def test_a_stop_string_before_min_tokens_is_text_even_when_all_comes_at_once(text: TextModel) -> None:
    choice = Choice(0, text, stops=["l"], min_tokens=6)
    piece = choice.feed(Delta("", text.encode("Hello, world!")))
    assert piece is not None and piece.text == "Hello, wor" and choice.completion_tokens == len("Hello, worl")
