"""The default model on text that repeats: the same greedy tokens, in fewer steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.bench.speculation_texts import QUOTE
from penstock.engine.request import Request, SamplingParams
from penstock.text import load_text
from tests.engine.harness import assert_idle, generate, greedy
from tests.engine.speculative.forced import eager_engine


@pytest.mark.slow
def test_a_quote_is_the_same_text_in_fewer_steps(default_model: Path) -> None:
    ids = load_text(default_model).encode(QUOTE)
    engine = eager_engine(default_model, num_blocks=128)
    requests = [
        greedy("greedy", ids, 40),
        Request("sampled", ids, SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=11)),
    ]
    speculation, engine.speculation = engine.speculation, None
    expected = generate(engine, *requests)
    plain = engine.steps
    engine.speculation = speculation
    assert generate(engine, *requests) == expected
    load = engine.load_snapshot()
    assert load.accepted_tokens > 20 and engine.steps - plain < plain
    assert_idle(engine)
