"""Settings of guardrails: rules of words and patterns, and those that ask a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from penstock.config.fields import setting

POLICY = (
    "hate or harassment, threats or incitement to violence, sexual content about minors, encouragement of self-harm, "
    "instructions for weapons or other serious crimes"
)
DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True, slots=True)
class GuardrailConfig:
    """A rule for what goes into models or comes out of them."""

    name: str = setting("", doc="What errors and metrics call it.")
    kind: Literal["patterns", "model"] = setting(
        "patterns", doc="patterns: words and patterns; model: a moderation model decides (model or url)."
    )
    tenants: tuple[str, ...] = setting((), doc="For these tenants; for all when tiers is empty too.", example="[acme]")
    tiers: tuple[str, ...] = setting((), doc="For tenants of these tiers.", example="[free]")
    stage: Literal["input", "output", "both"] = setting("both", doc="What it looks at: prompts, answers or both.")
    action: Literal["refuse", "redact"] = setting(
        "refuse", doc="refuse: 400, or the end of the answer; redact: put the replacement in its place (patterns)."
    )
    words: tuple[str, ...] = setting((), doc="Whole words, in any case.", example="[hunter2]")
    patterns: tuple[str, ...] = setting(
        (), doc="Regular expressions; in answers a match has at most 256 characters.",
        example="['[0-9]{3}-[0-9]{2}-[0-9]{4}']",
    )  # fmt: skip
    replacement: str = setting("[redacted]", doc="What stands for redacted text.", example='"[redacted]"')
    model: str = setting(
        "", doc="A chat model served here, or one of remotes, that is asked yes or no; with url: what is sent as model."
    )
    policy: str = setting("", doc="What is not allowed, as that chat model is told; a general list when empty.")
    url: str = setting(
        "", doc="A moderation endpoint as OpenAI's, asked instead of a chat model.",
        example="https://api.openai.com/v1/moderations",
    )  # fmt: skip
    key_env: str = setting(
        "", doc="Environment variable that holds the API key for url; never the key itself.", example="MODERATION_KEY"
    )
    categories: tuple[str, ...] = setting(
        (), doc="Categories of url that count; all when empty.", example="[violence, harassment]"
    )
    threshold: float | None = setting(
        None, doc="Probability from which text is refused; 0.5 for a chat model, and what url flags, when not set.",
        least=0, most=1, example="0.7",
    )  # fmt: skip
    on_error: Literal["refuse", "allow"] = setting(
        "refuse", doc="What happens to text when the moderation model fails or is too slow."
    )
    timeout_s: float = setting(5.0, doc="Seconds a question to it may take, waiting included.", least=0.01, most=60)
    concurrency: int = setting(16, doc="Questions to it at a time, per gateway process; more wait.", least=1, most=1024)
    window: int = setting(
        400, doc="Characters of an answer that are held back and looked at together.", least=1, most=4000
    )


_ONLY_MODEL = ("model", "policy", "url", "key_env", "categories", "threshold")


def problems(rules: Sequence[GuardrailConfig], tiers: Collection[str], models: Collection[str]) -> list[str]:
    """What is wrong with the rules. `models`: all names that a chat model has here."""
    found = []
    names = [rule.name for rule in rules]
    for index, rule in enumerate(rules):
        where = f"guardrails[{index}]"
        if not rule.name or names.index(rule.name) < index:
            found.append(f"{where}: a name of its own is needed")
        complaints = _model(rule, models) if rule.kind == "model" else _patterns(rule)
        found += [f"{where}: {complaint}" for complaint in complaints]
        found += [f'{where}.tiers: there is no tier "{name}"' for name in rule.tiers if name not in tiers]
    return found


def _patterns(rule: GuardrailConfig) -> list[str]:
    given = [name for name in _ONLY_MODEL if getattr(rule, name) not in ("", (), None)]
    if given:
        return [f"{', '.join(given)}: only used with kind: model"]
    if not (rule.words or rule.patterns) or not all((*rule.words, *rule.patterns)):
        return ["words or patterns are needed, and none of them empty (or kind: model)"]
    return []


def _model(rule: GuardrailConfig, models: Collection[str]) -> list[str]:
    found = []
    if rule.words or rule.patterns:
        found.append("words and patterns are not used with kind: model; make them a rule of their own")
    if rule.action == "redact":
        found.append("a model finds no places to redact; with kind: model the action is refuse")
    if rule.url:
        parts = urlsplit(rule.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            found.append("url is http://HOST/... or https://HOST/...")
        if rule.policy:
            found.append("policy is for chat models; a moderation endpoint has its own")
    elif not rule.model:
        found.append("kind: model needs a model or a url")
    else:
        if rule.model not in models:
            found.append(f'no model or remote is called "{rule.model}"')
        found += [f"{name} is only used with url" for name in ("key_env", "categories") if getattr(rule, name)]
    return found
