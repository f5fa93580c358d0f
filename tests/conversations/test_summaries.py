"""Old turns are summarised as notes: within their budget, oldest first, and never twice."""

from __future__ import annotations

from penstock.conversations import Conversation, Message, Summary
from penstock.conversations.summaries import SummaryBudget, Tokens, condense, transcripts, with_notes


def cut(text: str, most: int) -> str:
    words = text.split()
    return text if len(words) <= most else " ".join(words[:most])


WORDS = Tokens(count=lambda text: len(text.split()), cut=cut)
ROOM = SummaryBudget(note=8, notes=20, transcript=40)


def talk(turns: int) -> Conversation:
    return Conversation(
        turns=tuple(
            [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": f"answer {i}"}]
            for i in range(turns)
        )
    )


class Model:
    """Notes which answers it was shown."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def __call__(self, messages: list[Message], tokens: int) -> str:
        assert messages[0]["role"] == "system" and tokens == ROOM.note
        self.asked.append(messages[-1]["content"])
        return f"note {len(self.asked)} " + "word " * 20


async def test_each_turn_is_shown_once_and_notes_stay_within_their_room() -> None:
    model, conversation = Model(), talk(40)
    summary = Summary()
    for upto in (5, 12, 12, 40):
        summary = await condense(conversation, summary, upto, ask=model, tokens=WORDS, room=ROOM)
        assert summary.covers == upto
        assert sum(map(WORDS.count, summary.notes)) <= ROOM.notes
    shown = [text for text in model.asked if "question" in text]
    for turn in range(40):
        assert sum(f"question {turn} Answered: answer {turn}\n" in text for text in shown) == 1
    assert all(WORDS.count(text) <= ROOM.transcript + 20 for text in shown)


async def test_earlier_notes_are_left_alone_while_there_is_room() -> None:
    first = await condense(talk(4), Summary(), 2, ask=Model(), tokens=WORDS, room=ROOM)
    second = await condense(talk(4), first, 4, ask=Model(), tokens=WORDS, room=ROOM)
    assert second.notes[0] == first.notes[0] and len(second.notes) == 2


async def test_a_model_that_says_nothing_does_not_stop_it() -> None:
    async def silent(messages: list[Message], tokens: int) -> str:
        return "  "

    assert await condense(talk(3), Summary(), 3, ask=silent, tokens=WORDS, room=ROOM) == Summary(3)


def test_a_turn_that_is_too_long_is_cut_and_calls_are_told() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    turns = [
        [{"role": "user", "content": "w " * 500}],
        [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "noon"}],
    ]
    long, short = transcripts(turns, WORDS, 40)
    assert WORDS.count(long) == 40
    assert short == "Answered: clock({}) A tool returned: noon"


def test_notes_follow_the_system_prompt() -> None:
    (message,) = with_notes("Be kind.", Summary(2, ("Ann likes tea.", "She lives in Rome.")))
    assert message["role"] == "system"
    assert message["content"].startswith("Be kind.\n\n") and message["content"].endswith("tea.\nShe lives in Rome.")
    assert with_notes("", Summary()) == []
