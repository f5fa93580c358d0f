"""Settings of guardrails: rules of words and patterns, and rules decided by a moderation model."""

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
    """A rule for prompts or answers."""

    name: str = setting("", doc="Name in errors and metrics.")
    kind: Literal["patterns", "model"] = setting(
        "patterns", doc="patterns: words and patterns; model: a moderation model decides (model or url)."
    )
    tenants: tuple[str, ...] = setting((), doc="Tenants it applies to; if tiers is empty too, all.", example="[acme]")
    tiers: tuple[str, ...] = setting((), doc="Tiers it applies to.", example="[free]")
    stage: Literal["input", "output", "both"] = setting("both", doc="What it checks: prompts, answers or both.")
    action: Literal["refuse", "redact", "require"] = setting(
        "refuse", doc="refuse: reply 400 or end the answer; redact: insert the replacement; require: demand labels of "
        "whatever gets the prompt (the last two for patterns only).",
    )  # fmt: skip
    require: tuple[tuple[str, str], ...] = setting(
        (), doc="With action: require: the labels, so that a matching prompt does not leave.", several=True,
        example="{external: false}",
    )  # fmt: skip
    words: tuple[str, ...] = setting((), doc="Whole words, case-insensitive.", example="[hunter2]")
    patterns: tuple[str, ...] = setting(
        (), doc="Regular expressions; in answers, a match has at most 256 characters.",
        example="['[0-9]{3}-[0-9]{2}-[0-9]{4}']",
    )  # fmt: skip
    replacement: str = setting("[redacted]", doc="Text that replaces a match.", example='"[redacted]"')
    model: str = setting(
        "", doc="A served or remote chat model that answers yes or no; with url: the value sent as model."
    )
    policy: str = setting("", doc="What is not allowed, as told to the chat model; empty: a general list.")
    url: str = setting(
        "", doc="An OpenAI-compatible moderation endpoint, used instead of a chat model.",
        example="https://api.openai.com/v1/moderations",
    )  # fmt: skip
    labels: tuple[tuple[str, str], ...] = setting(
        (), doc="Labels of url for data rules; external is true unless given here.", example="{region: eu}"
    )
    key_env: str = setting(
        "", doc="Environment variable with the API key for url; never the key itself.", example="MODERATION_KEY"
    )
    categories: tuple[str, ...] = setting(
        (), doc="Categories of url that count; empty: all.", example="[violence, harassment]"
    )
    threshold: float | None = setting(
        None, doc="Probability from which text is refused; when not set, 0.5 for a chat model, and what url flags.",
        least=0, most=1, example="0.7",
    )  # fmt: skip
    on_error: Literal["refuse", "allow"] = setting(
        "refuse", doc="What to do with text when the moderation model fails or times out."
    )
    for_all_callers: bool = setting(
        False, doc="Whether model also reads texts of callers that may not use it themselves; for them the rule cannot "
        "be checked otherwise, see on_error.",
    )  # fmt: skip
    timeout_s: float = setting(5.0, doc="Time limit of a check in seconds, including waiting.", least=0.01, most=60)
    concurrency: int = setting(16, doc="Parallel checks per gateway process; further ones wait.", least=1, most=1024)
    window: int = setting(
        400, doc="Characters of an answer that are held back and checked together.", least=1, most=4000
    )


_ONLY_MODEL = ("model", "policy", "url", "key_env", "categories", "threshold")


def problems(rules: Sequence[GuardrailConfig], tiers: Collection[str], models: Collection[str]) -> list[str]:
    """Mistakes in the rules. `models`: the names of all chat models."""
    found = []
    names = [rule.name for rule in rules]
    for index, rule in enumerate(rules):
        where = f"guardrails[{index}]"
        if not rule.name or names.index(rule.name) < index:
            found.append(f"{where}: a unique name is needed")
        if (rule.action == "require") != bool(rule.require):
            found.append(f"{where}: action: require and require: {{LABEL: VALUE}} need each other")
        if rule.action == "require" and rule.stage == "output":
            found.append(f"{where}: action: require is about prompts; the stage must be input or both")
        if rule.labels and not rule.url:
            found.append(f"{where}.labels: only used with url; models and remotes have labels of their own")
        complaints = _model(rule, models) if rule.kind == "model" else _patterns(rule)
        found += [f"{where}: {complaint}" for complaint in complaints]
        found += [f'{where}.tiers: there is no tier "{name}"' for name in rule.tiers if name not in tiers]
    return found


def _patterns(rule: GuardrailConfig) -> list[str]:
    given = [name for name in _ONLY_MODEL if getattr(rule, name) not in ("", (), None)]
    if given:
        return [f"{', '.join(given)}: only used with kind: model"]
    if not (rule.words or rule.patterns) or not all((*rule.words, *rule.patterns)):
        return ["words or patterns are needed, none of them empty (or kind: model)"]
    return []


def _model(rule: GuardrailConfig, models: Collection[str]) -> list[str]:
    found = []
    if rule.words or rule.patterns:
        found.append("words and patterns are not used with kind: model; put them into a rule of their own")
    if rule.action != "refuse":
        found.append(f"a moderation model cannot {rule.action}; with kind: model the action must be refuse")
    if rule.url:
        parts = urlsplit(rule.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            found.append("url must be http://HOST/... or https://HOST/...")
        if rule.policy:
            found.append("policy is for chat models; a moderation endpoint has its own")
    elif not rule.model:
        found.append("kind: model needs a model or a url")
    else:
        if rule.model not in models:
            found.append(f'there is no model or remote "{rule.model}"')
        found += [f"{name} is only used with url" for name in ("key_env", "categories") if getattr(rule, name)]
    return found
