"""Which model a route chooses: every rule, the order of the rules, and how often it is right."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.routing.selection.classifier import Classifier, fit, rows
from penstock.routing.selection.evaluation import evaluate
from penstock.routing.selection.features import read
from penstock.routing.selection.prompts import own_prompts, parse
from penstock.routing.selection.score import score
from penstock.routing.selection.selector import RouteRules, select

RULES = RouteRules("auto", "mini", "maxi", tiers={"free": "small", "enterprise": "large"})
CODE = "Write a Python function that merges overlapping intervals and explain its complexity."


@pytest.mark.parametrize(
    ("text", "size", "rule"),
    [
        ("What is the capital of Portugal?", "small", "score"),
        (CODE, "large", "score"),
        ("Prove by induction that 3 divides n^3 - n.", "large", "score"),
        ("Compare the trade-offs of two designs step by step.", "large", "score"),
        ("ok", "small", "unknown"),
        ("word " * 801, "large", "length"),
    ],
)
def test_what_is_asked_decides(text: str, size: str, rule: str) -> None:
    chosen = select(RULES, text)
    assert (chosen.size, chosen.rule) == (size, rule)
    assert chosen.model == {"small": "mini", "large": "maxi"}[size]


def test_what_shows_nothing_takes_the_default_whichever_it_is() -> None:
    assert select(replace(RULES, default="large"), "hm").model == "maxi"
    assert select(replace(RULES, default="large"), "hm").rule == "unknown"


def test_the_whole_conversation_counts_for_length() -> None:
    assert select(RULES, "and then?", words=900).rule == "length"


def test_tiers_and_the_kill_switch_come_before_the_question() -> None:
    assert select(RULES, CODE, tier="free").rule == "tier"
    assert select(RULES, CODE, tier="free").size == "small"
    assert select(RULES, "hi", tier="enterprise").size == "large"
    off = select(replace(RULES, enabled=False), CODE, tier="enterprise")
    assert (off.rule, off.size) == ("off", "small")


def test_a_control_group_of_the_size_asked_for_and_always_the_same_users() -> None:
    rules = replace(RULES, share=0.8)
    groups = [select(rules, CODE, unit=f"user {i}").rule for i in range(2000)]
    assert 0.17 < groups.count("control") / len(groups) < 0.23
    assert groups == [select(rules, CODE, unit=f"user {i}").rule for i in range(2000)]


def test_the_reason_can_be_read() -> None:
    why = select(RULES, CODE).why("auto")
    assert why.startswith("auto; rule=score; score=0.") and "reasons=code" in why


@given(st.text(max_size=400), st.integers(0, 100_000))
def test_any_text_gets_a_score_between_0_and_1(text: str, wanted: int) -> None:
    found = score(read(text, wanted), 800)
    assert 0 <= found.value <= 1
    assert select(RULES, text, wanted_tokens=wanted).model in ("mini", "maxi")
    assert score(read(text, wanted + 1000), 800).value >= found.value - 1e-12, "asking for more is never easier"


def test_most_prompts_that_were_kept_back_are_decided_right() -> None:
    prompts = own_prompts()
    assert len(prompts) >= 300 and len({prompt.text for prompt in prompts}) == len(prompts)
    kept = [prompt for prompt in prompts if prompt.for_testing]
    assert len(kept) >= 80
    result = evaluate(kept, lambda text: select(RULES, text))
    assert result.accuracy >= 0.88, [prompt.text for prompt, _ in result.wrong]
    assert result.saved(10) > 0.4


def test_of_a_very_long_question_the_middle_is_not_looked_at() -> None:
    """So that reading one takes a bounded time."""
    noise = "why does this hang? " * 100_000
    assert read("def f(x): return x + 1 # " + noise).code > 0
    assert read(noise + "def f(x): return x + 1 # " + noise).code == 0


def test_a_classifier_learns_and_is_asked() -> None:
    rng = np.random.default_rng(0)
    texts = [prompt.text for prompt in own_prompts()]
    labels = np.array([prompt.size == "large" for prompt in own_prompts()])
    vectors = (rng.standard_normal((len(texts), 8)) * 0.1 + labels[:, None]).astype(np.float32)
    weights, bias = fit(rows(texts, vectors), labels)
    trained = Classifier("e", weights, bias, len(texts), 1.0)
    assert trained.probability("hello there", vectors[labels][0]) > 0.5 > trained.probability("hi", vectors[~labels][0])
    assert select(RULES, "hello there", opinion=0.99).size == "large"
    assert select(RULES, "What is this?", opinion=0.01).rule == "classifier"
    with pytest.raises(ConfigError, match="weights"):
        trained.probability("x", np.zeros(3, np.float32))


def test_a_bad_line_of_labelled_prompts_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ours\.tsv, line 2"):
        parse(["small\tchat\thi", "medium\tchat\thi"], "ours.tsv")
