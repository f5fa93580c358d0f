"""What a conversation has said so far, and the next request from it: the whole history and something new.

As token ids, lengths are exact: the model's own tokens are appended as the server returned them. As chat messages, the
server's template and tokenizer decide how long a text is; every turn corrects what the turns before it missed.
"""

from __future__ import annotations

import random
from typing import Any, Literal, Protocol

from penstock.bench.agents.plan import Conversation, Turn
from penstock.bench.stream import Answer, AnswerError

Api = Literal["completions", "chat"]
_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "it", "for", "was", "on", "are", "as", "with", "they", "at", "be"),
    *("this", "from", "have", "or", "by", "one", "had", "not", "but", "what", "all", "were", "when", "we", "there"),
    *("can", "an", "your", "which", "their", "said", "if", "do", "will", "each", "about", "how", "up", "out", "them"),
    *("then", "many", "some", "so", "these", "would", "other", "into", "has", "more", "two", "like", "see", "time"),
)
_TOKENS_PER_WORD = 1.1
"""Until the server has counted the first message."""


class History(Protocol):
    path: str

    def ask(self, turn: Turn) -> dict[str, Any]:
        """Add the turn's input; the fields of the request that carry the history."""
        ...

    def add(self, answer: Answer) -> None: ...


class TokenHistory:
    """Random token ids and the model's own."""

    path = "/v1/completions"

    def __init__(self, conversation: Conversation, vocab_size: int, shared: list[int]) -> None:
        """`shared`: what all conversations begin with; part of the first prompt."""
        self._rng = random.Random(conversation.seed)
        self._vocabulary = range(vocab_size)
        self._shared = shared
        self._ids: list[int] = []

    def ask(self, turn: Turn) -> dict[str, Any]:
        if not self._ids:
            self._ids += self._shared[: turn.prompt_len]
        self._ids += self._rng.choices(self._vocabulary, k=turn.prompt_len - len(self._ids))
        return {"prompt": self._ids, "return_token_ids": True}

    def add(self, answer: Answer) -> None:
        if len(answer.token_ids) != answer.output_tokens:
            raise AnswerError("the server does not return its token ids (`return_token_ids`); use --api chat")
        self._ids += answer.token_ids


class ChatHistory:
    """Messages of random words and the model's own."""

    path = "/v1/chat/completions"

    def __init__(self, conversation: Conversation, shared: list[str]) -> None:
        """`shared`: words of the system prompt that all conversations have; it is part of the first prompt."""
        self._rng = random.Random(conversation.seed)
        self._messages: list[dict[str, str]] = []
        self._counted = 0
        """Tokens of the conversation after the last answer, as the server counted them."""
        self._new_words = len(shared)
        """Added since."""
        self._words = self._tokens = 0
        """All that was added before, as sent and as counted."""
        if shared:
            self._messages.append({"role": "system", "content": " ".join(shared)})

    def ask(self, turn: Turn) -> dict[str, Any]:
        per_word = self._tokens / self._words if self._words else _TOKENS_PER_WORD
        wanted = round((turn.prompt_len - self._counted) / per_word) - self._new_words
        words = self._rng.choices(_WORDS, k=max(1, wanted))
        self._new_words += len(words)
        self._messages.append({"role": "user", "content": " ".join(words)})
        return {"messages": self._messages}

    def add(self, answer: Answer) -> None:
        added = answer.prompt_tokens - self._counted
        if added > 0:  # a template may leave out thoughts, and even shorten the conversation by that
            self._words += self._new_words
            self._tokens += added
        self._counted, self._new_words = answer.prompt_tokens + answer.output_tokens, 0
        self._messages.append({"role": "assistant", "content": answer.text})


class Histories:
    """New histories for one model; all begin with the same `shared_len` tokens."""

    def __init__(self, api: Api, vocab_size: int, shared_len: int, seed: int) -> None:
        rng = random.Random(f"{seed} shared")
        self._api = api
        self._vocab_size = vocab_size
        self._ids = rng.choices(range(vocab_size), k=shared_len if api == "completions" else 0)
        self._words = rng.choices(_WORDS, k=round(shared_len / _TOKENS_PER_WORD) if api == "chat" else 0)

    def new(self, conversation: Conversation) -> History:
        if self._api == "chat":
            return ChatHistory(conversation, self._words)
        return TokenHistory(conversation, self._vocab_size, self._ids)
