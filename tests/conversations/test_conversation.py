"""A client's next messages extend a conversation; a stored conversation is read back unchanged."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.conversations import Conversation, Message, Owner, Summary
from penstock.conversations.conversation import pack, split_turns, unpack_conversation, unpack_summary


def said(role: str, content: str, **more: object) -> Message:
    return {"role": role, "content": content, **more}


def user(content: str) -> Message:
    return said("user", content)


def assistant(content: str) -> Message:
    return said("assistant", content)


KEPT = Conversation(
    system="Be kind.", turns=split_turns([user("hi"), assistant("Hello!"), user("2+2?"), assistant("4")])
)


def test_new_words_are_a_new_turn() -> None:
    extended = KEPT.extended([user("And 3+3?")])
    assert [turn[0]["content"] for turn in extended.turns] == ["hi", "2+2?", "And 3+3?"]
    assert extended.system == "Be kind." and extended.end == 3 and extended.epoch == 0


def test_a_system_message_replaces_the_system_prompt_unless_it_is_for_one_answer() -> None:
    messages = [said("system", "Be brief."), user("x")]
    assert KEPT.extended(messages).system == "Be brief."
    assert KEPT.extended(messages, keep_system=False).system == "Be kind."


def test_a_client_that_sends_its_whole_history_replaces_what_is_stored() -> None:
    edited = [user("hi"), assistant("Hello!"), user("2+3?"), assistant("5"), user("Sure?")]
    extended = msgspec.structs.replace(KEPT, first=7, start=8).extended(edited)
    assert extended.since(0) == edited
    assert (extended.first, extended.start, extended.epoch) == (0, 0, 1)
    assert extended.own(Summary(5, ("old",))) == Summary(epoch=1)


def test_results_of_calls_go_on_with_the_turn() -> None:
    call = said("assistant", "", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}])
    result = said("tool", "42", tool_call_id="c")
    asked = Conversation().extended([user("f?")])
    kept = msgspec.structs.replace(asked, turns=split_turns([*asked.since(0), call]))
    for sent in ([result], [call, result]):
        assert kept.extended(sent).since(0) == [user("f?"), call, result]


def test_turns_are_counted_from_the_first_ever_said() -> None:
    kept = msgspec.structs.replace(KEPT, first=10)
    assert kept.end == 12
    assert [m["content"] for m in kept.since(11)] == ["2+2?", "4"]
    assert kept.since(0) == kept.since(10)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=30), st.integers(1, 2000))
def test_a_bounded_history_forgets_the_oldest_turns_only(sizes: list[int], most: int) -> None:
    turns = tuple([user("x" * size)] for size in sizes)
    bounded = Conversation(turns=turns, first=3, start=3).bounded(most)
    assert bounded.turns == turns[len(turns) - len(bounded.turns) :]
    assert bounded.end == 3 + len(turns) and bounded.turns and bounded.start == bounded.first
    lengths = [len(msgspec.msgpack.encode(turn)) for turn in turns]
    kept = sum(lengths[-len(bounded.turns) :])
    assert kept <= most or len(bounded.turns) == 1
    assert len(bounded.turns) == len(turns) or kept + lengths[-len(bounded.turns) - 1] > most


def test_what_is_packed_is_compressed_and_comes_back() -> None:
    long = Conversation(turns=split_turns([user("the same words again " * 500), assistant("ok")]), start=1, epoch=2)
    assert unpack_conversation(pack(long)) == long
    assert len(pack(long)) < 500
    assert unpack_summary(pack(Summary(3, ("a", "b"), 1))) == Summary(3, ("a", "b"), 1)
    assert unpack_summary(b"") == Summary()
    with pytest.raises(ValueError, match="format"):
        unpack_conversation(b"\x09" + pack(long)[1:])


def test_owners_are_told_apart_whatever_they_are_called() -> None:
    assert Owner("a", "bc").digest != Owner("ab", "c").digest != Owner("abc").digest
    assert Owner("a", "1:b").digest != Owner("a1:", "b").digest


def test_messages_keep_their_numbers_when_others_are_deleted() -> None:
    talk = Conversation().extended([user("a")]).followed_by([said("assistant", "b")]).extended([user("c")])
    assert talk.numbered() == [(0, user("a")), (1, said("assistant", "b")), (2, user("c"))]
    left = talk.with_messages([entry for entry in talk.numbered() if entry[0] != 1])
    assert left.since(0) == [user("a"), user("c")] and left.epoch == talk.epoch + 1
    assert [number for number, _ in left.followed_by([said("assistant", "d")]).numbered()] == [0, 2, 3]
    old = Conversation(turns=([user("a")],))  # as an earlier version stored it
    assert old.followed_by([said("assistant", "b")]).numbered() == [(0, user("a")), (1, said("assistant", "b"))]
