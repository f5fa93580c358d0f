"""The questions about the standard library, and the entries that answer them."""

from __future__ import annotations

import re

import pytest

from penstock.bench.knowledge.corpus import corpus
from penstock.bench.knowledge.questions import DESCRIBED, NAMED, QUESTIONS
from penstock.bench.knowledge.retrieval import Answer, figures


@pytest.mark.slow
def test_most_questions_have_an_answer_in_the_documents_of_this_python() -> None:
    entries = {title for _, text in corpus() for title in re.findall(r"^## (\S+)$", text, re.MULTILINE)}
    answered = [question for question, right in QUESTIONS if entries & set(right)]
    assert len(entries) > 3000
    assert len(answered) > 0.95 * len(QUESTIONS)
    assert {*DESCRIBED, *NAMED} == {*QUESTIONS}


def test_recall_mrr_and_the_passages_of_a_prompt() -> None:
    answers = [Answer("a", 1, 0.0), Answer("b", 5, 0.0), Answer("c", 0, 0.0), Answer("d", 12, 0.0)]
    assert figures(answers) == (0.75, (1 + 1 / 5) / 4, 0.25)
