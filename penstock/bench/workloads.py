"""The fixed workloads, by name: how many requests, how long, how they arrive.

Everything random comes from `random.Random(0)`, so a name means the same requests on every machine and in every
release; a changed workload needs a new name. Lengths and token ids are drawn from two separate generators, so
that a model's vocabulary does not change the lengths.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.engine.request import Request, SamplingParams
from penstock.errors import ConfigError

SEED = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """A set of requests without prefix reuse, end-of-text ignored."""

    name: str
    requests: int
    input_len: tuple[int, int]
    """Inclusive range; equal ends mean a fixed length."""
    output_len: tuple[int, int]
    temperature: float = 0.0
    concurrency: int | None = None
    """Closed loop with this many requests in flight; None submits all at once."""
    max_running: int | None = None
    """Most sequences in one step; the engine's own default when not set."""
    shape: str = ""
    """The shape it runs with where no model and no other shape is named; empty: the default model."""

    @property
    def longest(self) -> int:
        """Context window the workload needs."""
        return self.input_len[1] + self.output_len[1]

    @property
    def summary(self) -> str:
        def span(ends: tuple[int, int]) -> str:
            return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}–{ends[1]}"

        how = "at once" if self.concurrency is None else f"with {self.concurrency} in flight"
        noun = "request" if self.requests == 1 else "requests"
        of = f", {self.shape}" if self.shape else ""
        return f"{self.requests} {noun} {how}, {span(self.input_len)} in / {span(self.output_len)} out{of}"

    def lengths(self) -> Iterator[tuple[int, int]]:
        """(input, output) lengths of each request, drawn in that order."""
        rng = random.Random(SEED)
        for _ in range(self.requests):
            yield _draw(rng, self.input_len), _draw(rng, self.output_len)

    def build(self, vocab_size: int, *, salt: str = "") -> list[Request]:
        """The requests for a model of this vocabulary. A salt of its own keeps repeated runs from sharing
        cached prefixes, without switching the prefix cache off."""
        rng = random.Random(SEED)
        ids = range(vocab_size)
        return [
            Request(
                request_id=f"{self.name}-{salt}-{index}",
                prompt=rng.choices(ids, k=inputs),
                params=SamplingParams(max_tokens=outputs, temperature=self.temperature, seed=index),
                cache_salt=salt,
            )
            for index, (inputs, outputs) in enumerate(self.lengths())
        ]


def _draw(rng: random.Random, ends: tuple[int, int]) -> int:
    return ends[0] if ends[0] == ends[1] else rng.randint(*ends)


def _at_once(name: str, requests: int, inputs: int, outputs: int, temperature: float = 0.0) -> Workload:
    return Workload(name, requests, (inputs, inputs), (outputs, outputs), temperature)


def closed_loop(concurrency: int, inputs: int = 128, outputs: int = 128) -> Workload:
    """`cN`: N requests in flight, four per slot."""
    ends = (inputs, inputs), (outputs, outputs)
    return Workload(f"c{concurrency}", 4 * concurrency, *ends, concurrency=concurrency)


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        _at_once("b1", 1, 128, 256),
        _at_once("b64", 64, 256, 256),
        _at_once("b256", 256, 256, 256),
        Workload("mix", 256, (100, 1024), (100, 1024), temperature=0.6, max_running=256),
        _at_once("prefill", 512, 1024, 16, temperature=0.6),
        _at_once("ttft128", 1, 128, 1),
        _at_once("ttft2048", 1, 2048, 1),
        Workload("moe-ttft128", 1, (128, 128), (1, 1), shape="qwen3-30b-a3b:24"),
        _at_once("long30k", 1, 30_000, 16),
        _at_once("long100k", 1, 100_000, 16),
        _at_once("long8x30k", 8, 30_000, 256),
        _at_once("long32x16k", 32, 16_000, 256),
        *(closed_loop(concurrency) for concurrency in (1, 8, 16, 32, 64)),
    )
}


def named(name: str) -> Workload:
    """The workload of this name; a readable error lists the others."""
    try:
        return WORKLOADS[name]
    except KeyError:
        raise ConfigError(f"unknown workload {name!r}; there are: {', '.join(WORKLOADS)}") from None


def shape_of(names: Iterable[str], shape: str | None, *, model_is_default: bool) -> str | None:
    """The shape that these workloads run with, None: a model. `shape`: the one that was named."""
    if shape is not None or not model_is_default:
        return shape
    own = {named(name).shape for name in names}
    if len(own) > 1:
        raise ConfigError(
            f"{', '.join(names)} are of different models: run them one by one, or name one with --model or --shape"
        )
    return next(iter(own), "") or None


def warm_up(workload: Workload, vocab_size: int) -> list[Request]:
    """Short requests of the same number in flight, ending one after another, so that every smaller batch size
    has run once (buffers allocated, kernels chosen, graphs captured) before anything is timed."""
    rng = random.Random(SEED + 1)
    count = workload.concurrency or workload.requests
    ids = range(vocab_size)
    inputs = min(32, workload.input_len[0])
    return [
        Request(
            request_id=f"warm-up-{index}",
            prompt=rng.choices(ids, k=inputs),
            params=SamplingParams(
                max_tokens=2 + 16 * (count - index) // count + (count // (index + 1)).bit_length(),
                temperature=workload.temperature,
                seed=index,
            ),
            cache_salt="warm-up",
        )
        for index in range(count)
    ]
