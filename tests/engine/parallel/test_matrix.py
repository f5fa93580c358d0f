"""Everything with everything, over several ranks: the text is that of one device (R-ENG-10, R-ENG-18).

`MATRIX` is the table: a dimension has options, the first of which is the default; a new feature is one line. The slow
suite takes as many cases as it needs for every pair of options to meet once; the quick one those of `QUICK`. What
cannot be is a line of `REFUSED`, and a row of the table in docs/parallelism.md.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

import pytest
from llguidance import LLMatcher

from penstock.bench.soak.engines import verify_everything
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig, Role
from penstock.engine.core import Engine
from penstock.engine.parallel import launch
from penstock.engine.request import Delta, Request, SamplingParams
from penstock.engine.sleep.sleep import EngineSleep
from penstock.errors import ConfigError
from tests.engine.grammar.tokens import END, compiler
from tests.engine.harness import assert_idle, carry, collect, drain, generate
from tests.engine.parallel.matrix_models import Models
from tests.engine.parallel.threads import _spawn

Case = dict[str, str]
"""By dimension: the option."""


@dataclass(frozen=True)
class Option:
    settings: dict[str, Any] = field(default_factory=dict)
    """Of the engine with ranks, and of the one it is compared with."""
    ranks: dict[str, Any] = field(default_factory=dict)
    """Of the engine with ranks only: they must not change the text."""
    params: dict[str, Any] = field(default_factory=dict)
    """Of requests."""
    model: str = ""
    """A family, or a form of weights: see `Models`."""
    apart: float = 1e-3
    """How far log-probabilities may be from those of one device."""
    same_tokens: bool = True
    """False: weights are rounded differently, and only log-probabilities are compared, on average: where two experts
    are almost as good, the other one may be taken."""


INT16: dict[str, Any] = {"activations": "int16"}
"""One form of arithmetic for any number of rows: what is fastest is measured, and not the same in two engines."""
TIGHT: dict[str, Any] = {"num_blocks": 34, "block_size": 4}
SAMPLED = {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95, "temperature": 0.8, "seed": 7}
PENALIZED = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1, "logit_bias": {5: 2.0}}
DATES = LLMatcher.grammar_from_regex(r"(19|20)\d\d-(0[1-9]|1[0-2])-[0-3]\d( and (19|20)\d\d){0,3}!")


def few_bits(stored: str, **settings: Any) -> Option:
    return Option({**INT16, **settings}, model=stored)


MATRIX: dict[str, dict[str, Option]] = {
    "grid": {
        "2x2": Option(ranks={"tensor_parallel": 2, "pipeline_parallel": 2}),
        "2x1": Option(ranks={"tensor_parallel": 2}),
        "1x2": Option(ranks={"pipeline_parallel": 2}),
        "4x1": Option(ranks={"tensor_parallel": 4}),
    },
    "family": {
        "grouped queries": Option(model="llama-gqa"),
        "one KV head": Option(model="llama-mqa-tied"),
        "sliding window": Option(model="mistral-window"),
        "query and key norms": Option(model="qwen3-qknorm"),
        "experts": Option(model="qwen3-moe"),
        "experts on shards": Option(ranks={"expert_parallel": True, "expert_rebalance_s": 0.0}, model="qwen3-moe"),
        "copied experts": Option(ranks={"expert_parallel": True, "expert_copies": 1}, model="qwen3-moe"),
        "attention by sequences": Option(
            ranks={"expert_parallel": True, "attention_parallel": "data", "expert_rebalance_s": 0.0}, model="qwen3-moe"
        ),
        "gemma": Option(model="gemma2"),
    },
    "weights": {
        "dense": Option(),
        "int8": Option({"weights": "int8", **INT16}),
        "int4": Option({"weights": "int4", **INT16}),
        "fp8": Option({"weights": "fp8"}),
        "stored fp8": Option(model="fp8"),
        "stored fp8 tiles": Option(model="fp8-tiles"),
        "gptq": few_bits("gptq"),
        # Dense on ranks where its groups are scattered: more exact than the kernels, which round minima to float16.
        "gptq act-order": replace(few_bits("gptq-act-order"), apart=0.03, same_tokens=False),
        "awq": few_bits("awq"),
        "compressed-tensors int4": few_bits("packed-zero-point"),
        "compressed-tensors int8": few_bits("int8"),
        "Q4_0": few_bits("Q4_0", weights="int4"),
        "Q8_0": few_bits("Q8_0", weights="int8"),
        "Q4_K": few_bits("Q4_K", weights="int4"),
        "Q6_K": few_bits("Q6_K", weights="int8"),
    },
    "cache": {
        "full": Option({"kv_dtype": "full"}),
        # A number between two steps rounds either way: sums over shards differ in the last bit.
        "int8": Option({"kv_dtype": "int8"}, apart=1e-2),
        "fp8": Option({"kv_dtype": "fp8"}, apart=1e-2),
    },
    "room": {
        "plenty": Option(),
        "preemption": Option(ranks=TIGHT),
        "host memory": Option(ranks={**TIGHT, "host_memory": 8 << 20}),
        "disk": Option(ranks={**TIGHT, "host_memory": 64 << 10, "disk_memory": 16 << 20}),
        "no prefixes": Option(ranks={"prefix_cache": False}),
    },
    "speculation": {
        "off": Option(),
        "ngram": Option(ranks={"speculation": "ngram"}),
        "draft": Option(ranks={"speculation": "draft"}),
    },
    "adapters": {"none": Option(), "two": Option()},
    "requests": {
        "greedy": Option(),
        "sampled": Option(params={**SAMPLED, **PENALIZED}),
        "log-probabilities": Option(params={"logprobs": 2, "prompt_logprobs": 1}),
        "grammar": Option(params={"grammar": DATES, "stop_token_ids": (END,), "temperature": 1.0, "seed": 3}),
        "token rules": Option(params={"allowed_token_ids": tuple(range(0, 190, 3)), "bad_words": ((3,), (6, 9))}),
    },
    "role": {
        "both": Option(),
        "prefill": Option(ranks={"role": "prefill"}),
        "decode": Option(ranks={"role": "decode"}),
    },
    "numbers": {"usual": Option(), "deterministic": Option({"deterministic": True})},
    "sleep": {"awake": Option(), "asleep in between": Option()},
}

QUICK: list[Case] = [
    {"weights": "Q4_K", "cache": "int8", "requests": "log-probabilities"},
    {
        "grid": "2x1",
        "family": "experts on shards",
        "weights": "gptq act-order",
        "requests": "sampled",
        "adapters": "two",
    },
    {"family": "one KV head", "cache": "fp8", "speculation": "ngram", "room": "preemption", "role": "decode"},
    {"grid": "2x1", "family": "sliding window", "weights": "stored fp8 tiles", "room": "host memory"},
    {"family": "gemma", "numbers": "deterministic", "sleep": "asleep in between"},
]


@dataclass(frozen=True)
class Refusal:
    case: Case
    text: str
    """Part of the error, and of a row of the table in the documentation."""


REFUSED = [
    Refusal({"numbers": "deterministic", "family": "copied experts"}, "sums depend on which shard has an expert"),
    Refusal({"family": "experts on shards", "grid": "1x2"}, "experts are spread over tensor_parallel devices"),
    Refusal({"family": "copied experts", "grid": "1x2"}, "experts are spread over tensor_parallel devices"),
    Refusal({"family": "attention by sequences", "grid": "1x2"}, "experts are spread over tensor_parallel devices"),
    Refusal({"room": "no prefixes", "role": "prefill"}, "hands over blocks by name, which prefix_cache: false forbids"),
    Refusal({"room": "no prefixes", "role": "decode"}, "hands over blocks by name, which prefix_cache: false forbids"),
]
ELSEWHERE = (
    "cannot split",
    "is more than the",
    "more than the 8 experts",
    "this model has no experts",
    "does not split the draft model evenly",
    "names 2 devices for 4 ranks",
    "else run replicas of the model",
    "there the engine restarts as a whole",
    "read a checkpoint of their own",
    "not available with adapters on this device",
    "a prompt is handed over with its state",
    "models, which run through transformers",
    "models, whose layers keep states and which run through transformers",
    "it has no parts for several ranks",
    "layers with an indexer",
)
"""Rows of the documentation's table that other tests cause."""


def allowed(case: Case) -> bool:
    return not any(refusal.case.items() <= case.items() for refusal in REFUSED)


def pairwise() -> list[Case]:
    """Cases in which every allowed pair of options meets at least once."""
    rng = random.Random(0)
    options = [[(dimension, name) for name in found] for dimension, found in MATRIX.items()]
    left = {
        frozenset((one, other))
        for some, more in combinations(options, 2)
        for one in some
        for other in more
        if allowed(dict((one, other)))
    }
    cases = []
    while left:
        case: Case = dict(min(left, key=sorted))
        for dimension in rng.sample(options, len(options)):
            if dimension[0][0] in case:
                continue
            possible = [option for option in dimension if allowed({**case, option[0]: option[1]})]
            rng.shuffle(possible)
            best = max(possible, key=lambda o: sum(frozenset((o, chosen)) in left for chosen in case.items()))
            case[best[0]] = best[1]
        left -= {frozenset(pair) for pair in combinations(case.items(), 2)}
        cases.append({dimension: case[dimension] for dimension in MATRIX})
    return cases


def described(case: Case) -> str:
    return ", ".join(option for dimension, option in case.items() if option != next(iter(MATRIX[dimension])))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("matrix"))


class Subject:
    """An engine as a case describes it: with ranks, or the one device to compare with."""

    def __init__(self, case: Case, models: Models, *, with_ranks: bool) -> None:
        case = {dimension: case.get(dimension, next(iter(found))) for dimension, found in MATRIX.items()}
        self.case = case
        self.chosen = {dimension: MATRIX[dimension][case[dimension]] for dimension in MATRIX}
        self.with_ranks = with_ranks
        family = self.chosen["family"].model
        settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "token_budget": 48}
        settings["num_blocks"] = 400
        for option in self.chosen.values():
            settings |= option.settings
        if case["adapters"] == "two":
            settings["adapters"] = tuple(AdapterSpec(str(i), str(models.adapter(family, i))) for i in range(2))
        self.alone = EngineConfig(str(models.model(family, self.chosen["weights"].model)), **settings)
        over = {name: value for option in self.chosen.values() for name, value in option.ranks.items()}
        if over.get("speculation") == "draft":
            over["draft_model"] = str(models.model("qwen3-qknorm", self.chosen["weights"].model))
        if "disk_memory" in over:
            over["disk_path"] = str(models.root)
        self.config = replace(self.alone, **over) if with_ranks else self.alone

    @contextmanager
    def engine(self) -> Iterator[None]:
        self.sleeper = EngineSleep(self.config, self.load)
        self.now = self.load(self.config)
        try:
            yield
        finally:
            self.now.close()

    def load(self, config: EngineConfig) -> Engine:
        with patch.object(launch, "_spawn", _spawn):
            engine = Engine.load(config, grammars=compiler if self.case["requests"] == "grammar" else None)
        if engine.speculation is not None:
            verify_everything(engine.speculation)
        return engine

    def nap(self) -> None:
        if self.with_ranks and self.case["sleep"] != "awake":
            self.now = self.sleeper.wake(self.sleeper.sleep(self.now))

    def requests(self, turn: int, said: dict[str, list[int]]) -> list[Request]:
        """Prompts of very different lengths, so that steps mix prompts and decodes; the second turn goes on where the
        first ended."""
        params = SamplingParams(max_tokens=8, **{"temperature": 0.0, **self.chosen["requests"].params})
        names = ["", "0", "1"] if self.case["adapters"] == "two" else [""]
        made = []
        for i in range(3):
            prompt = [(i * 17 + j % 23 * 5) % 190 for j in range(5 + 37 * i)]
            prompt += [*said[f"r{i}"], 4, 2] if turn else []
            made.append(Request(f"r{i}", prompt, replace(params, seed=i), adapter=names[i % len(names)]))
        return made

    def hand_over(self, other: Engine, requests: list[Request]) -> Engine:
        """Move the prompts' blocks between an engine on one device and this one; the engine that is to answer."""
        giver, taker = (self.now, other) if self.case["role"] == "prefill" else (other, self.now)
        assert giver.exchange is not None and taker.exchange is not None
        for request in requests:
            # The blocks of an adapter have a name once it has been read.
            generate(taker, Request("first", [1, 2], SamplingParams(max_tokens=1), adapter=request.adapter))
            generate(giver, request)
            names = [*takewhile(giver.exchange.has, taker.exchange.names(request))]
            if names:
                taker.exchange.release(carry(giver, taker, names))
        load = taker.load_snapshot()
        assert load.handover is not None
        assert load.handover.blocks_in > 0 or request.params.prompt_logprobs is not None  # all must be computed there
        return taker

    def talk(self) -> list[Delta]:
        """Two turns of a few conversations."""
        deltas: list[Delta] = []
        said: dict[str, list[int]] = {}
        for turn in range(2):
            requests, engine = self.requests(turn, said), self.now
            if self.with_ranks and self.case["role"] != "both":
                role: Role = "decode" if self.case["role"] == "prefill" else "prefill"
                one = replace(self.alone, role=role, block_size=self.config.block_size)
                engine = self.hand_over(self.load(one), requests)
            for request in requests:
                engine.submit(request)
            now = drain(engine)
            assert_idle(engine)
            said = collect(now)
            deltas += now
            if turn == 0:
                self.nap()
        return deltas

    def scores(self) -> list[float]:
        """The log-probability of every token of a prompt."""
        self.now.submit(Request("s", [7 * j % 190 for j in range(40)], SamplingParams(max_tokens=1, prompt_logprobs=0)))
        scored = next(delta.prompt_logprobs for delta in drain(self.now) if delta.prompt_logprobs is not None)
        return [score.logprob for score in scored if score is not None]

    def check_used(self) -> None:
        """What the case is about must have happened."""
        load = self.now.load_snapshot()
        # The blocks of windows are soon free again, attention by sequences has more of them; prompt log-probabilities
        # need every token computed.
        roomy = self.case["family"] in ("sliding window", "attention by sequences")
        if self.case["sleep"] == "awake" and self.case["role"] == "both" and not roomy:
            if self.case["speculation"] == "off":  # else sequences may end before others need their room
                assert load.preemptions > 0 or self.case["room"] != "preemption"
            if self.case["requests"] != "log-probabilities":
                assert load.restored_blocks > 0 or self.case["room"] != "host memory"
        if self.case["requests"] not in ("grammar", "token rules") and self.case["role"] != "prefill":
            assert load.draft_tokens > 0 or self.case["speculation"] != "draft"


def logprobs(deltas: list[Delta]) -> list[float]:
    """Request by request: those of a step may come in any order."""
    by_request = sorted(deltas, key=lambda delta: delta.request_id)
    every = [score for delta in by_request for score in [*(delta.prompt_logprobs or ()), *(delta.logprobs or ())]]
    return [value for score in every if score is not None for value in (score.logprob, *score.top_logprobs)]


def compare(case: Case, models: Models) -> None:
    ranks, alone = Subject(case, models, with_ranks=True), Subject(case, models, with_ranks=False)
    with ranks.engine(), alone.engine():
        apart = max(option.apart for option in ranks.chosen.values())
        found, expected = ranks.talk(), alone.talk()
        ranks.check_used()
        if not all(option.same_tokens for option in ranks.chosen.values()):
            pairs = zip(ranks.scores(), alone.scores(), strict=True)
            assert mean(abs(here - there) for here, there in pairs) < apart
            return
        assert collect(found) == collect(expected)
        assert logprobs(found) == pytest.approx(logprobs(expected), abs=apart)


@pytest.mark.parametrize("case", QUICK, ids=described)
def test_ranks_say_what_one_device_says(case: Case, models: Models) -> None:
    compare(case, models)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(), ids=described)
def test_every_pair_of_features_says_what_one_device_says(case: Case, models: Models) -> None:
    compare(case, models)


def test_the_quick_cases_are_allowed_and_have_every_dimension() -> None:
    assert all(allowed(case) for case in QUICK)
    chosen = {dimension for case in QUICK for dimension in case}
    assert set(MATRIX) == chosen


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: described(refusal.case))
def test_what_cannot_be_is_refused_with_the_reason(refusal: Refusal, models: Models) -> None:
    subject = Subject(refusal.case, models, with_ranks=True)
    with pytest.raises(ConfigError, match=re.escape(refusal.text)):
        subject.load(subject.config)


def test_the_documentation_lists_what_is_refused() -> None:
    text = (Path(__file__).parents[3] / "docs/parallelism.md").read_text()
    section = text.split("## What is refused")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    for refusal in REFUSED:
        assert any(refusal.text in row for row in rows), refusal
    for row in rows:
        assert any(words in row for words in (*ELSEWHERE, *(refusal.text for refusal in REFUSED))), row
