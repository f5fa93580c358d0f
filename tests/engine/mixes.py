"""Random mixes for `test_mixes`: a family, features of the engine, and requests with any parameters. A pure function of
the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.bench.soak.forms import forms
from penstock.bench.soak.traffic import END, VOCABULARY, Case, Form
from penstock.engine.grammar.guidance import GuidanceCompiler
from penstock.engine.request import Request, SamplingParams, Thought

VOCAB = 199
WINDOW = 256
FAMILIES = (
    "llama-gqa", "mistral-window", "gemma2", "gemma3-two-ropes", "cohere2", "llama4", "gpt-oss", "qwen3-moe",
    "deepseek-v2-lite", "deepseek-v3", "qwen3-next", "qwen3.5", "granite4-hybrid", "falcon-h1", "nemotron-h", "mamba2",
)  # fmt: skip
EXPERTS = {"llama4", "gpt-oss", "qwen3-moe", "deepseek-v2-lite", "deepseek-v3", "qwen3-next", "granite4-hybrid",
           "mimo-v2-flash", "laguna", "minimax-m3", "step3.5", "mistral-large4", "muse-spark", "glm5-next"}  # fmt: skip
RECURRENT = {"qwen3-next", "qwen3.5", "granite4-hybrid", "falcon-h1", "nemotron-h", "mamba2", "kimi-linear",
             "glm5-next"}  # fmt: skip
WITH_MTP = {"deepseek-v3", "qwen3-next", "qwen3.5", "mimo-v2-flash", "deepseek-v4", "glm5-next"}
ADAPTERS = ("adapter-0", "adapter-1", "adapter-2")
FORMS = [form for form in forms() if form.name in ("a person in JSON", "a date", "a choice")]


def compiler(size: int) -> GuidanceCompiler:
    return GuidanceCompiler(VOCABULARY, size)


@dataclass(frozen=True)
class Mix:
    """An engine that does everything at once."""

    seed: int
    family: str
    settings: dict[str, Any]
    """Of this engine alone: they must not change the text."""
    shared: dict[str, Any]
    """Of the plain engine too, because they change numbers."""
    drafts: str
    """Where draft tokens come from: `off`, `ngram`, `draft`, `mtp`, or right ones and wrong ones (`oracle`)."""
    adapters: bool
    ahead: bool
    """Steps are launched before the last one is collected, as on CUDA."""
    faults: float
    """The share of steps that fail."""
    between: str
    """What happens between the two turns of conversations: nothing, `sleep` or `restart`."""
    tie: float
    tags: list[str] = field(default_factory=list)

    @property
    def timed(self) -> bool:
        """Whether threads, and how long copies take, decide which requests run together."""
        return "host_memory" in self.settings

    def __str__(self) -> str:
        return f"{self.seed}: " + ", ".join([self.family, *self.tags])


def draw_mix(seed: int, **fixed: Any) -> Mix:
    """`fixed`: what is not left to chance."""
    rng = random.Random(f"mix {seed}")
    family = fixed.get("family", rng.choice(FAMILIES))
    tags: list[str] = []

    def chosen(name: str, chance: float) -> bool:
        found = bool(fixed.get(name, rng.random() < chance))
        if found:
            tags.append(name)
        return found

    block = rng.choice((4, 8, 16))
    settings: dict[str, Any] = {
        "block_size": block,
        "num_blocks": WINDOW // block + rng.randrange(2, 12),
        "max_running": rng.choice((3, 8, 12)),
        "token_budget": rng.choice((24, 48, 96)),
    }
    shared: dict[str, Any] = {}
    if family in RECURRENT:
        settings |= {"state_interval": block * rng.choice((1, 2, 4)), "kept_states": rng.choice((0, 6, 6, 12))}
    form = fixed.get("form", rng.choice(("", "", "", "int8 cache", "int8 weights", "deterministic")))
    if form == "int8 cache":
        shared["kv_dtype"] = "int8"
    elif form == "int8 weights":
        shared |= {"weights": "int8", "activations": "int16"}
    elif form == "deterministic":
        shared["deterministic"] = True
    if not chosen("prefixes", 0.9):
        settings["prefix_cache"] = False
    # Where batches differ by chance, the last bit does too, and a router may take another expert.
    elif (family not in EXPERTS or form == "deterministic") and chosen("host", 0.6):
        settings |= {"host_memory": 1 << 20, "host_idle_s": rng.choice((0.0, 30.0))}
        if chosen("disk", 0.6):
            settings |= {"host_memory": 128 << 10, "disk_memory": 32 << 20, "disk_persistent": chosen("kept", 0.5)}
    drafts = fixed.get("drafts", rng.choice(("off", "ngram", "oracle", "oracle", "draft", "mtp")))
    if drafts == "mtp" and family not in WITH_MTP:
        drafts = "oracle"
    if drafts != "off":
        settings |= {"speculation_depth": rng.choice((2, 6))}
    adapters = family != "mamba2" and chosen("adapters", 0.5)
    ahead = chosen("ahead", 0.5)
    faults = 0.05 if chosen("faults", 0.2) else 0.0
    between = fixed.get("between", rng.choice(("", "", "sleep", "restart")))
    tags += [tag for tag in (form, drafts, between) if tag and tag != "off"]
    # A last bit that differs may round a key to another int8.
    tie = 0.0 if form == "deterministic" else 0.05 if form == "int8 cache" else 5e-3
    return Mix(seed, family, settings, shared, drafts, adapters, ahead, faults, between, tie, tags)


class Talk:
    """The requests of a mix."""

    def __init__(self, mix: Mix, count: int = 6) -> None:
        self.mix = mix
        self.rng = random.Random(f"talk {mix.seed}")
        self.count = count
        self._documents = [self._tokens(length) for length in (30, 80, 130)]

    def first(self) -> list[Case]:
        cases = [self._case(f"a{index}", self._prompt()) for index in range(self.count)]
        # Further choices of the same prompt.
        for index in range(2):
            one = self.rng.choice(cases)
            params = replace(one.request.params, seed=self.rng.randrange(1 << 40))
            cases.append(replace(one, request=replace(one.request, request_id=f"n{index}", params=params)))
        return cases

    def second(self, said: dict[str, list[int]], earlier: list[Case]) -> list[Case]:
        """Conversations go on, and answers that were cut are continued."""
        cases = []
        for case in earlier:
            request, tokens = case.request, said[case.request.request_id]
            if not tokens:
                continue
            name = request.request_id + "-again"
            if self.rng.random() < 0.4 and case.fate == "finish" and len(tokens) > 1:
                cut = self.rng.randrange(1, len(tokens))
                params = replace(request.params, logprobs=None, prompt_logprobs=None)
                moved = replace(request, request_id=name, params=params, produced=tokens[:cut])
                cases.append(Case(moved, "finish", form=case.form))
            elif len(request.prompt) + len(tokens) < WINDOW - 60 and self.rng.random() < 0.7:
                prompt = request.prompt + tokens + self._tokens(self.rng.randrange(1, 12))
                cases.append(self._case(name, prompt, request))
        return cases

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCAB) for _ in range(count)]

    def _prompt(self) -> list[int]:
        rng = self.rng
        head = list(rng.choice(self._documents)) if rng.random() < 0.7 else []
        if head and rng.random() < 0.3:
            head = head[: rng.randrange(1, len(head))]
        if rng.random() < 0.3:
            head += self._tokens(6) * rng.randrange(2, 4)
        return head + self._tokens(rng.randrange(1, 24))

    def _case(self, name: str, prompt: list[int], before: Request | None = None) -> Case:
        rng = self.rng
        values, form = self._params()
        adapter = before.adapter if before is not None else ""
        if before is None and self.mix.adapters and rng.random() < 0.6:
            adapter = rng.choice(ADAPTERS)
        request = Request(
            name,
            prompt,
            SamplingParams(**values),
            priority=rng.choice((0, 0, 0, 1, -1)),
            cache_salt=rng.choice(("", "", "", "other")) if before is None else before.cache_salt,
            speculation=rng.random() < 0.9,
            adapter=adapter,
        )
        if rng.random() < 0.1:
            return Case(request, "cancel", rng.randrange(30), form)
        return Case(request, "finish", form=form)

    def _params(self) -> tuple[dict[str, Any], Form | None]:
        rng = self.rng
        values: dict[str, Any] = {"max_tokens": rng.choice((1, 8, 20, 40)), "seed": rng.randrange(1 << 40)}
        values["temperature"] = rng.choice((0.0, 0.0, 0.7, 1.1))
        # What is filtered changes where probabilities are equal to the last bit: not where batches differ by chance.
        if rng.random() < 0.25 and not self.mix.timed:
            values |= {"top_k": rng.choice((0, 5, 30)), "top_p": rng.choice((0.8, 1.0)), "min_p": rng.choice((0, 0.02))}
        if rng.random() < 0.1 and not self.mix.timed:
            values["typical_p"] = 0.9
        if rng.random() < 0.35:
            values |= {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": rng.choice((1.0, 1.3))}
        if rng.random() < 0.25:
            values["logit_bias"] = {rng.randrange(VOCAB): 4.0, rng.randrange(VOCAB): -4.0}
        if rng.random() < 0.4:
            values |= {"stop_token_ids": tuple(rng.sample(range(VOCAB), 6)), "min_tokens": rng.choice((0, 5, 12))}
        if rng.random() < 0.35:
            values["logprobs"] = rng.choice((0, 3))
        if rng.random() < 0.08:
            values["prompt_logprobs"] = 2
        if rng.random() < 0.15:
            values["watermark"] = b"a key"
        if rng.random() < 0.1:
            values["allowed_token_ids"] = tuple(rng.sample(range(VOCAB), 120))
        if rng.random() < 0.1:
            words = [(rng.randrange(VOCAB),) for _ in range(3)] + [tuple(self._tokens(2)) for _ in range(20)]
            values["bad_words"] = tuple(words)
        form = None
        if rng.random() < 0.2:
            form = rng.choice(FORMS)
            values |= {"grammar": form.grammar, "stop_token_ids": (END,), "max_tokens": rng.choice((12, 40))}
            for name in ("allowed_token_ids", "bad_words"):
                values.pop(name, None)
        if rng.random() < 0.35:
            values["thought"] = self._thought(form is not None)
            form = None  # the answer is not all that is said
        return values, form

    def _thought(self, constrained: bool) -> Thought:
        rng = self.rng
        begin = rng.choice(((), tuple((token,) for token in rng.sample(range(VOCAB), 30))))
        opening = rng.choice(((), (192, 193))) if constrained else ()
        return Thought(
            end=((190,), *((token,) for token in rng.sample(range(VOCAB), 15)), *((token, 5) for token in range(9))),
            begin=() if opening else begin,
            opening=opening,
            after=rng.choice(((), (191,))) if constrained else (),
            close=(190,) if constrained else rng.choice(((190,), (7, 190, 8))),
            budget=rng.choice((None, 0, 4, 9)) if constrained else rng.choice((0, 4, 9, 25)),
        )
