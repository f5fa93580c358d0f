"""What was lost: what clients got, against what they should have got and against the ledger. No I/O.

Exact for every answer that came to its end: its text, its usage and its charge. An attempt that broke off for good
because its gateway and its engine died together is asked again by its client. The ledger then holds what that gateway
had noted, a fifth of a second and a transaction before; what the client had received of it beyond that is nobody's
loss but the operator's, and is counted (`uncharged_tokens`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.metering.prices import Price
from penstock.metering.prices import Usage as Priced


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server says at the end of an answer."""

    prompt: int
    completion: int


@dataclass(slots=True)
class Attempt:
    """One try of a request, under a request id of its own. Resuming a stream is the same attempt."""

    request_id: str
    most: int
    """Completion tokens that were asked for."""
    received: int = 0
    """Pieces of text, each at least one token."""
    usage: Usage | None = None
    """Only of an answer that came to its end."""
    sent: int = 0
    """How often it was sent as a new request: when nobody replied it is sent again under the same id."""
    refused: int = 0
    """How often the server said that it does nothing for it."""
    abandoned: bool = False
    """Nobody knew it any more when its client wanted to go on."""
    priced: bool = True
    """Embeddings cost nothing here."""


@dataclass(frozen=True, slots=True)
class Row:
    """A charge in the ledger; `settled_by` is None while it is open."""

    id: str
    request_id: str
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    cost: int = 0
    settled_by: str | None = "end"


@dataclass(frozen=True, slots=True)
class Answer:
    """What one client got in the end, and what it should have got."""

    name: str
    text: str
    expected: str | None
    """None: not known; then only its usage is compared, with the ledger."""
    complete: bool
    problem: str = ""

    @property
    def missing(self) -> int:
        """Characters from the first difference on."""
        if self.expected is None:
            return 0
        alike = 0
        for ours, theirs in zip(self.text, self.expected, strict=False):
            if ours != theirs:
                break
            alike += 1
        return max(len(self.expected), len(self.text)) - alike


@dataclass(slots=True)
class Losses:
    """Everything that is not as it should be; empty when nothing was lost."""

    streams: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    charges: list[str] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    conversations: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    """What the fault itself checks, such as a damaged file."""

    def counts(self) -> dict[str, int]:
        kinds = ("streams", "tokens", "charges", "keys", "conversations", "other")
        return {kind: len(getattr(self, kind)) for kind in kinds}

    def __bool__(self) -> bool:
        return any(self.counts().values())

    def lines(self) -> list[str]:
        return [f"{kind}: {line}" for kind in self.counts() for line in getattr(self, kind)]


@dataclass(slots=True)
class Balance:
    """The ledger in numbers."""

    charges: int = 0
    exact: int = 0
    """Charges that equal the usage that a client was told."""
    broken: int = 0
    """Charges of attempts that broke off for good."""
    unclaimed_tokens: int = 0
    """Tokens on those that no client received: produced, then lost with their gateway."""
    cost_nanos: int = 0
    uncharged_tokens: int = 0
    """Tokens that clients received of attempts that were abandoned, and that were not charged."""


def compare(answers: Iterable[Answer], losses: Losses) -> None:
    """Texts against what they should be."""
    for answer in answers:
        if not answer.complete:
            losses.streams.append(f"{answer.name} did not end: {answer.problem or 'no reason'}")
        elif answer.missing:
            losses.tokens.append(f"{answer.name} differs in its last {answer.missing} characters")


def balance(attempts: Sequence[Attempt], rows: Iterable[Row], price: Price, losses: Losses) -> Balance:
    """The ledger against what clients were told."""
    sums = Balance()
    by_request: defaultdict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_request[row.request_id].append(row)
    for attempt in attempts:
        _one(attempt, by_request.pop(attempt.request_id, []), price, losses.charges, sums)
    for request_id, strangers in by_request.items():
        losses.charges.append(f"{len(strangers)} for {request_id}, which nobody asked for")
    return sums


def _one(attempt: Attempt, rows: list[Row], price: Price, wrong: list[str], sums: Balance) -> None:
    name = attempt.request_id
    if open_rows := [row for row in rows if row.settled_by is None]:
        wrong.append(f"{name}: {len(open_rows)} never settled")
        return
    if len(rows) > max(attempt.sent, 1):
        wrong.append(f"{name}: charged {len(rows)} times, sent {attempt.sent} times")
    for row in rows:
        sums.charges += 1
        sums.cost_nanos += row.cost
        if row.cost not in (0, _cost(attempt, row, price)):  # what is refused after all is free
            wrong.append(f"{name}: {row.cost} nanodollars for {row.prompt}/{row.cached}/{row.completion} tokens")
        if row.completion > attempt.most:
            wrong.append(f"{name}: {row.completion} tokens charged, {attempt.most} asked for")
    told = attempt.usage
    if told is None:
        charged = sum(row.completion for row in rows)
        sums.broken += len(rows)
        sums.unclaimed_tokens += max(0, charged - attempt.received)
        if attempt.abandoned:
            sums.uncharged_tokens += max(0, attempt.received - charged)
        elif charged < attempt.received:
            wrong.append(f"{name}: {attempt.received} tokens received, {charged} charged")
        return
    same = [
        row
        for row in rows
        if (row.prompt, row.completion) == (told.prompt, told.completion) and row.cost == _cost(attempt, row, price)
    ]
    if not same:
        wrong.append(f"{name}: the client was told {told}, the ledger has {[(r.prompt, r.completion) for r in rows]}")
        return
    sums.exact += 1
    rest = [row for row in rows if row is not same[0]]
    sums.broken += len(rest)
    sums.unclaimed_tokens += sum(row.completion for row in rest)


def _cost(attempt: Attempt, row: Row, price: Price) -> int:
    return price.cost(Priced(row.prompt, row.cached, row.completion)) if attempt.priced else 0


def balance_totals(
    attempts: Sequence[Attempt], *, requests: int, prompt: int, completion: int, losses: Losses
) -> Balance:
    """The sums of a ledger against what clients were told, where single charges cannot be seen. Exact unless attempts
    broke off for good; then within what these may have cost."""
    told = [attempt.usage for attempt in attempts if attempt.usage is not None]
    unsure = [attempt for attempt in attempts if attempt.usage is None or attempt.sent > 1 + attempt.refused]
    told_prompt, told_completion = sum(usage.prompt for usage in told), sum(usage.completion for usage in told)
    received = sum(attempt.received for attempt in attempts if attempt.usage is None)
    most = sum(attempt.most * max(attempt.sent, 1) for attempt in unsure)
    if requests < len(told):
        losses.charges.append(f"{len(told)} answers, {requests} charges")
    if prompt < told_prompt or (not unsure and prompt != told_prompt):
        losses.charges.append(f"{told_prompt} prompt tokens told, {prompt} charged")
    if not told_completion + received <= completion <= told_completion + most:
        losses.charges.append(
            f"{told_completion} completion tokens told and {received} received of broken streams, {completion} charged"
        )
    exact = len(told) if not losses.charges else 0
    return Balance(requests, exact, max(0, requests - len(told)), max(0, completion - told_completion - received))
