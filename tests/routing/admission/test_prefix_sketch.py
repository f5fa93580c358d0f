"""How much of a prompt is probably cached: the longest of a few lengths that was seen before."""

from __future__ import annotations

import pytest

from penstock.routing.admission.prefix_sketch import PrefixSketch


@pytest.mark.parametrize(
    ("length", "known"),
    [(63, 0), (64, 64), (255, 64), (256, 256), (1023, 256), (1024, 1024), (4095, 1024), (4096, 4096), (9000, 4096)],
)
def test_a_prompt_seen_again_is_known_up_to_a_length(length: int, known: int) -> None:
    sketch, prompt = PrefixSketch(), list(range(length))
    assert sketch.cached(prompt, "") == 0
    assert sketch.cached(prompt, "") == known
    assert sketch.cached(prompt, "other tenant") == 0


def test_only_the_common_beginning_is_known() -> None:
    sketch = PrefixSketch()
    sketch.cached(list(range(2000)), "")
    assert sketch.cached([*range(300), *[7] * 3000], "") == 256
    assert sketch.cached([7, *range(1, 300)], "") == 0
    assert sketch.cached([*range(256), 9, *range(257, 2000)], "") == 256
    assert sketch.cached([*range(63), 7, *range(64, 2000)], "") == 0


def test_the_least_recently_seen_is_dropped_first() -> None:
    sketch = PrefixSketch(most=2)
    first, second, third = ([start] * 64 for start in (1, 2, 3))
    sketch.cached(first, "")
    sketch.cached(second, "")
    assert sketch.cached(first, "") == 64
    sketch.cached(third, "")
    assert len(sketch._seen) == 2
    assert sketch.cached(first, "") == 64 and sketch.cached(second, "") == 0
