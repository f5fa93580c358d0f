"""Which model a route chooses: every rule, the order of the rules, and what stands against a choice."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.routing.selection.classifier import Classifier, fit, rows
from penstock.routing.selection.features import read
from penstock.routing.selection.prompts import own_prompts, parse
from penstock.routing.selection.representation import word_count
from penstock.routing.selection.selector import RouteRules, constrained, select

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
        ("", "small", "unknown"),
        ("?!", "small", "unknown"),
    ],
)
def test_what_is_asked_decides(text: str, size: str, rule: str) -> None:
    chosen = select(RULES, text)
    assert (chosen.size, chosen.rule) == (size, rule)
    assert chosen.model == {"small": "mini", "large": "maxi"}[size]


def test_what_shows_nothing_takes_the_default_whichever_it_is() -> None:
    assert select(replace(RULES, default="large"), "hm").model == "maxi"
    assert select(replace(RULES, default="large"), "hm").rule == "unknown"


def test_a_score_just_below_the_threshold_decides_nothing() -> None:
    value = select(RULES, CODE).score
    assert value is not None
    unsure = replace(RULES, threshold=min(value + 0.01, 1.0), unsure=0.1)
    assert select(unsure, CODE).rule == "unknown"
    assert select(replace(unsure, unsure=0.0), CODE).rule == "score"


def test_what_was_asked_before_decides_where_the_last_message_tells_nothing() -> None:
    chosen = select(RULES, "and then?", earlier=["hello", CODE])
    assert (chosen.size, chosen.rule) == ("large", "score") and chosen.reasons[-1] == "earlier"
    assert select(RULES, "Thanks, that was all!", earlier=[CODE]).size == "small"


def test_everything_that_is_read_counts_for_length_in_words_or_tokens() -> None:
    assert select(RULES, "and then?", words=801).rule == "length"
    assert select(RULES, "and then?", words=800).rule == "unknown"
    tokens = replace(RULES, long_tokens=100)
    assert select(tokens, "and then?", words=900, tokens=100).rule == "unknown"
    assert select(tokens, "and then?", tokens=101).rule == "length"


def test_words_are_counted_in_scripts_without_spaces() -> None:
    assert word_count("one two  three\nfour") == 4
    assert 8 <= word_count("请用一句话总结这篇文章的主要内容") <= 12
    assert word_count("用 Python 写") == 3
    assert word_count("наша первая встреча") == 3


def test_tiers_and_the_kill_switch_come_before_the_question() -> None:
    assert select(RULES, CODE, tier="free").rule == "tier"
    assert select(RULES, CODE, tier="free").size == "small"
    assert select(RULES, "hi", tier="enterprise").size == "large"
    off = select(replace(RULES, enabled=False), CODE, tier="enterprise")
    assert (off.rule, off.size) == ("off", "small")


def test_a_control_group_of_the_size_asked_for_and_always_the_same_users() -> None:
    rules = replace(RULES, share=0.8)
    groups = [select(rules, "hm", unit=f"user {i}").rule for i in range(500)]
    assert 0.14 < groups.count("control") / len(groups) < 0.26
    assert groups == [select(rules, "hm", unit=f"user {i}").rule for i in range(500)]


def test_the_reason_can_be_read() -> None:
    why = select(RULES, CODE).why("auto")
    assert re.fullmatch(r"auto; rule=score; score=[01]\.\d\d; reasons=(\w+,)*code(,\w+)*", why)
    assert "reasons=" in select(RULES, "Thanks, all tests pass!").why("auto")


def test_the_other_model_answers_where_something_stands_against_the_chosen_one() -> None:
    chosen = select(RULES, CODE)
    cheap = constrained(RULES, chosen, {"large": "cost"})
    assert (cheap.model, cheap.size, cheap.rule, cheap.wanted) == ("mini", "small", "cost", "score")
    assert cheap.why("auto").startswith("auto; rule=cost; instead_of=score; score=")
    assert constrained(RULES, chosen, {"small": "window"}) == chosen
    assert constrained(RULES, chosen, {"small": "window", "large": "window"}) == chosen


@given(st.text(max_size=400), st.integers(0, 100_000))
def test_any_text_gets_a_score_between_0_and_1(text: str, wanted: int) -> None:
    chosen = select(replace(RULES, unsure=0.0), text, wanted_tokens=wanted)
    assert chosen.model in ("mini", "maxi")
    assert chosen.score is not None and 0 <= chosen.score <= 1
    more = select(replace(RULES, unsure=0.0), text, wanted_tokens=wanted + 1000)
    assert more.score is not None and more.score >= chosen.score - 1e-12, "asking for more is never easier"


def test_a_classifier_learns_and_is_asked() -> None:
    rng = np.random.default_rng(0)
    prompts = own_prompts()[:300]
    texts = [prompt.text for prompt in prompts]
    labels = np.array([prompt.size == "large" for prompt in prompts])
    vectors = (rng.standard_normal((len(texts), 8)) * 0.1 + labels[:, None]).astype(np.float32)
    weights, bias = fit(rows(texts, vectors), labels)
    trained = Classifier("e", weights, bias, len(texts), 1.0)
    assert trained.probability("hello there", vectors[labels][0]) > 0.5 > trained.probability("hi", vectors[~labels][0])
    assert select(RULES, "hello there", opinion=0.99).size == "large"
    assert select(RULES, "What is this?", opinion=0.01).rule == "classifier"
    with pytest.raises(ConfigError, match="weights"):
        trained.probability("x", np.zeros(3, np.float32))


def test_of_a_very_long_question_the_middle_is_not_looked_at() -> None:
    """So that reading one takes a bounded time."""
    noise = "why does this hang? " * 100_000
    assert read("def f(x): return x + 1 # " + noise).code > 0
    assert read(noise + "def f(x): return x + 1 # " + noise).code == 0


def test_a_bad_line_of_labelled_prompts_is_named() -> None:
    with pytest.raises(ConfigError, match=r"ours\.tsv, line 2"):
        parse(["small\tchat\thi", "medium\tchat\thi"], "ours.tsv")
