"""The text side of a model: tokenizer, chat template, end tokens.

A `TextModel` does not change once built (tables are filled lazily), and the tokenizer releases
the GIL while it works, so any number of threads may share one. No torch here.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from penstock.config.sampling import UNSET_DEFAULTS, SamplingDefaults
from penstock.errors import CheckpointError
from penstock.text.chat_template import ChatTemplate, ChatTemplateError, TemplateTooHeavy, flatten
from penstock.text.detokenizer import IncrementalDetokenizer
from penstock.text.guard import Guard, SpecialTokens
from penstock.text.infill import InfillTokens, infill_tokens
from penstock.text.template_calls import CallStyle, call_style
from penstock.text.template_fit import PROBE, Accepted, accepted
from penstock.text.template_meter import WORK
from penstock.text.thought_styles import detect
from penstock.text.token_bytes import decoding_rule
from penstock.text.tokenizer_calls import encode_ids, ending, most_bytes_per_token

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

QUICK_WORK = 10_000
QUICK_CHARACTERS = 16384
"""What a chat may take on an event loop: work in units of `template_meter`, and text to tokenize."""
OTHER_TEMPLATES = 16
"""Compiled templates of requests that are kept."""


class TextModel:
    """Turns text and chats into token ids, and token ids into text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: ChatTemplate | None = None,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        context_length: int | None = None,
        sampling: SamplingDefaults = UNSET_DEFAULTS,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token for token, added in self._added.items() if added.special)
        self._special = SpecialTokens({self._added[token].content: token for token in self._special_ids})
        self._to_bytes, self.strips_first_space = decoding_rule(tokenizer.decoder)
        self.vocab_size: int = vocab_size or tokenizer.get_vocab_size()
        """Number of ids of the model; some may have no token."""
        self.context_length = context_length
        self.takes_grammars = True
        """Whether its tokens spell what the engine thinks they do, which constrains them."""
        self.sampling = sampling
        """What the checkpoint's makers recommend."""
        self._bytes: list[bytes | None] = [None] * max(self.vocab_size, max(self._added, default=0) + 1)
        self._before, self._after = self._surroundings()
        self._begins_text = self._section_marks() if self.strips_first_space else frozenset()
        self._guarded: tuple[Tokenizer, dict[int, int]] | None = None
        self._guarded_lock = threading.Lock()
        self._others: dict[str, ChatTemplate] = {}
        self._other_lock = threading.Lock()
        ends = [*eos_token_ids, *self._turn_ends()]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys(ends))
        """All ids that end an answer, the most common first."""

    def adapted(
        self, tokenizer: Tokenizer | None, templates: Mapping[str, str], special: Mapping[str, str], rows: int
    ) -> TextModel:
        """The same with what an adapter brings: a tokenizer, chat templates by name, spellings of special tokens.
        `rows`: how many tokens there are with it; an end token behind them never comes."""
        used = self._tokenizer if tokenizer is None else tokenizer
        end = special.get("eos_token", "")
        token = used.token_to_id(end) if end else None
        template = self._template
        if templates:
            known = {} if template is None else template.variables
            template = ChatTemplate(templates, {**known, **{name: text for name, text in special.items() if text}})
        text = TextModel(
            used,
            template=template,
            eos_token_ids=(*(() if token is None or token >= rows else (token,)), *self.eos_token_ids),
            vocab_size=rows,
            context_length=self.context_length,
            sampling=self.sampling,
        )
        text.takes_grammars = tokenizer is None or self._spells_as(text)
        return text

    def _spells_as(self, other: TextModel) -> bool:
        """Whether another has the same tokens, but for control tokens and those that one of them does not have."""
        control = self._special_ids | other._special_ids
        return not any(
            mine and others and mine != others
            for token in range(self.vocab_size)
            if token not in control
            for mine, others in [(self.token_bytes(token), other.token_bytes(token))]
        )

    # --- text to ids

    def encode(
        self,
        text: str,
        *,
        special: bool = True,
        add_special_tokens: bool | None = None,
        most: int | None = None,
        last: int | None = None,
    ) -> list[int]:
        """Token ids of a text.

        `special`: control tokens spelled out in the text are recognised; without it they are ordinary text.
        `add_special_tokens`: adds special tokens at both ends, such as BOS, as the model's tokenizer does; the same
        as `special` when not given. `most`: of a longer text only the first ids come back, more than `most`, without
        the work of making them all. `last`: of a longer text only so many ids at its end, special tokens included.
        """
        if add_special_tokens is None:
            add_special_tokens = special
        if last is not None:
            around = len(self._before) + len(self._after) if add_special_tokens else 0
            ids = self.encode(ending(self._tokenizer, text, last), special=special, add_special_tokens=False)
            ids = ids[-(last - around) :] if last > around else []
            return [*self._before, *ids, *self._after][:last] if add_special_tokens else ids
        if special:
            return encode_ids(self._tokenizer, text, add_special_tokens=add_special_tokens, most=most)
        ids = self._encode_guarded(text, most)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a chat as text for people. For token ids use `encode_chat`: in this text user text can no
        longer be distinguished from control tokens."""
        return self._chat_template().render(
            flatten(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def encode_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        template: ChatTemplate | None = None,
        most: int | None = None,
        last: int | None = None,
        quick: bool = False,
    ) -> list[int]:
        """Token ids of a chat's prompt. Control tokens come only from the template, never from messages.
        `continue_final`: see `ChatTemplate.render`. `template`: used instead of the model's own. `most` and `last`:
        see `encode`. `quick`: `TemplateTooHeavy` if that would take more than a millisecond or so."""
        guard = Guard(self._special)
        rendered = (template or self._chat_template()).render(
            guard.messages(flatten(messages)),
            add_generation_prompt=add_generation_prompt,
            continue_final=continue_final,
            tools=guard.value(tools),
            template_kwargs=guard.value(template_kwargs),
            work=QUICK_WORK if quick else WORK,
        )
        if quick and len(rendered) > QUICK_CHARACTERS:
            raise TemplateTooHeavy(f"the prompt has {len(rendered)} characters")
        text = guard.restore(self._special.rename(rendered))
        if last is not None:
            return self._encode_guarded(ending(self._guarded_tokenizer()[0], text, last))[-last:]
        return self._encode_guarded(text, most)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def template_source(self) -> str:
        """The chat template's text; empty without one."""
        return "" if self._template is None else self._template.source

    @property
    def template_knows_tools(self) -> bool:
        """Whether the chat template supports tools."""
        return self._template is not None and self._template.knows_tools

    @property
    def special_tokens(self) -> dict[str, str | None]:
        """How the special tokens that templates and benchmarks ask for are spelled."""
        known = {} if self._template is None else self._template.variables
        ends = self.token_spelling(self.eos_token_ids[0]) if self.eos_token_ids else None
        return {
            "bos_token": known.get("bos_token") or None,
            "eos_token": ends,
            "pad_token": known.get("pad_token") or None,
        }

    @property
    def template_names(self) -> frozenset[str]:
        """The variables that the chat template expects."""
        return frozenset() if self._template is None else self._template.names

    def other_template(self, source: str) -> ChatTemplate:
        """A template that came with a request, compiled; the last few are kept."""
        with self._other_lock:
            known = self._others.pop(source, None)
            if known is None:
                try:
                    known = ChatTemplate(source, {} if self._template is None else self._template.variables)
                except CheckpointError as error:
                    raise ChatTemplateError(
                        str(error).replace("the model's chat template", "`chat_template`")
                    ) from error
            self._others[source] = known
            if len(self._others) > OTHER_TEMPLATES:
                del self._others[next(iter(self._others))]
            return known

    @functools.cached_property
    def accepted(self) -> Accepted:
        """What conversations the chat template takes."""
        return accepted(self._probed, self.call_style)

    @functools.cached_property
    def call_style(self) -> CallStyle:
        """How the chat template takes function calls of the history."""
        return call_style(self._probed)

    def _probed(self, messages: Messages) -> str:
        """What the template shows, where it is offered a function if it supports that."""
        tools = (PROBE,) if self.template_knows_tools else None
        return self.render_chat(messages, add_generation_prompt=False, tools=tools)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; send a plain text prompt instead of messages")
        return self._template

    @functools.cached_property
    def infill(self) -> InfillTokens | None:
        """How the model is asked to fill a gap; None: it has no tokens for that."""
        return infill_tokens(self.token_id)

    def between(self, infill: InfillTokens, before: list[int], after: str, files: Sequence[int] = ()) -> list[int]:
        """The prompt for the gap between `before` and `after`. `files`: the tokens of other files, which come first."""
        prompt = infill.prompt(before, self.encode(after, add_special_tokens=False))
        return [*self._before, *files, *prompt]

    @functools.cached_property
    def most_bytes_per_token(self) -> int | None:
        """The most bytes of a text that become one token; None: there is no limit."""
        return most_bytes_per_token(self._tokenizer)

    def _encode_guarded(self, text: str, most: int | None = None) -> list[int]:
        """Ids of a text in which control tokens count only under their secret names."""
        tokenizer, real = self._guarded_tokenizer()
        ids = encode_ids(tokenizer, text, add_special_tokens=False, most=most)
        return [real.get(token, token) for token in ids] if real else ids

    def _guarded_tokenizer(self) -> tuple[Tokenizer, dict[int, int]]:
        """A tokenizer with the same vocabulary but renamed control tokens, and a map from its ids to the real ones,
        where they differ."""
        with self._guarded_lock:
            if self._guarded is None:
                source = self._tokenizer
                guarded = Tokenizer(source.model)
                if source.normalizer is not None:
                    guarded.normalizer = source.normalizer
                if source.pre_tokenizer is not None:
                    guarded.pre_tokenizer = source.pre_tokenizer
                names = []
                for token in sorted(self._added):
                    added = self._added[token]
                    name = self._special.secret(added.content) if added.special else added.content
                    names.append((name, token, added))
                guarded.add_tokens(
                    [
                        AddedToken(
                            name,
                            single_word=added.single_word,
                            lstrip=added.lstrip,
                            rstrip=added.rstrip,
                            normalized=added.normalized and not added.special,
                        )
                        for name, _, added in names
                    ]
                )
                real: dict[int, int] = {}
                for name, token, _ in names:
                    guarded_id = guarded.token_to_id(name)
                    assert guarded_id is not None, "a token that was just added"
                    if guarded_id != token:
                        real[guarded_id] = token
                self._guarded = guarded, real
            return self._guarded

    # --- ids to text

    def decode(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of a sequence of ids; malformed UTF-8 becomes replacement characters."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(tokens) + detokenizer.flush()

    def added_length(self, tokens: Sequence[int], text: str) -> int:
        """Characters of the special tokens that the tokenizer put before `text` to make `tokens`."""
        before = self._before
        if not before or list(tokens[: len(before)]) != before:
            return 0
        added = self.decode(before, skip_special=False)
        return (
            0 if text.startswith(added) and self.encode(text, add_special_tokens=False) == list(tokens) else len(added)
        )

    def without_added(self, tokens: list[int]) -> list[int]:
        """Without the special tokens at its beginning that the tokenizer puts before every text."""
        before = self._before
        return tokens[len(before) :] if before and tokens[: len(before)] == before else tokens

    def detokenizer(
        self, *, skip_special: bool = True, continuation: bool = False, shown: frozenset[int] = frozenset()
    ) -> IncrementalDetokenizer:
        """A detokenizer for one stream of ids. `continuation`: they continue a prompt's text (completions). `shown`:
        control tokens that are shown nevertheless."""
        return IncrementalDetokenizer(self, skip_special=skip_special, continuation=continuation, shown=shown)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text; none for an id without a token."""
        if not 0 <= token < len(self._bytes):
            return b""
        known = self._bytes[token]
        if known is None:
            spelling = self._tokenizer.id_to_token(token)
            known = self._bytes[token] = b"" if spelling is None else self._to_bytes(spelling)
        return known

    def token_text(self, token: int) -> str:
        """A single token as text; incomplete characters become replacement characters."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_spelling(self, token: int) -> str:
        """A token as the vocabulary spells it, such as `Ġthe`; empty for an id without one."""
        return self._tokenizer.id_to_token(token) or ""

    def token_id(self, spelling: str) -> int | None:
        """The id of a token by its spelling in the vocabulary."""
        found: int | None = self._tokenizer.token_to_id(spelling)
        return found

    def added_id(self, spelling: str) -> int | None:
        """The id of a token that is always one token where its spelling occurs; None: there is none."""
        found = self.token_id(spelling)
        return found if found is not None and found in self._added else None

    def begins_text(self, token: int) -> bool:
        """Whether the text behind this token is encoded like the beginning of a text, with a space before it."""
        return token in self._begins_text

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token, which is not shown in text."""
        return token in self._special_ids

    # --- facts found out while building

    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer adds before and after every text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        return [], []

    def _section_marks(self) -> frozenset[int]:
        """Added tokens behind which the tokenizer puts a space, as it does at the beginning of a text."""
        alone = self._tokenizer.encode("a", add_special_tokens=False).ids
        known: dict[tuple[bool, bool], bool] = {}
        found = set()
        for token, added in self._added.items():
            kind = added.normalized, added.special
            if kind not in known:
                known[kind] = self._tokenizer.encode(f"{added.content}a", add_special_tokens=False).ids == [
                    token,
                    *alone,
                ]
            if known[kind]:
                found.add(token)
        return frozenset(found)

    def _turn_ends(self) -> list[int]:
        """The control tokens that end an assistant's turn in the template."""
        style = detect(self.template_source)
        if style is not None and style.stops:
            return [id for mark in style.stops if (id := self.token_id(mark)) is not None]
        turn_end = self._turn_end()
        return [] if turn_end is None else [turn_end]

    def _turn_end(self) -> int | None:
        """The control token that ends an assistant's turn in the template."""
        if self._template is None or self._special.pattern is None:
            return None
        answer = "answer-to-find"
        try:
            rendered = self.render_chat(
                [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}],
                add_generation_prompt=False,
            )
        except ChatTemplateError:
            return None  # a template with other roles; only the checkpoint's own end tokens count
        rest = rendered.rpartition(answer)[2].lstrip()
        match = self._special.pattern.match(rest)
        return self._special.ids[match[0]] if match else None
