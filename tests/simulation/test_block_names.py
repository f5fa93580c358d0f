"""Names made of segments are equal exactly where names made of tokens are."""

from __future__ import annotations

import random

from penstock.engine.kv.block_hash import block_names
from penstock.simulation.arrival import Segment
from penstock.simulation.block_names import segment_names


def text(segments: list[Segment]) -> list[int]:
    """Tokens that no two segments share."""
    return [id * 10_000 + position for id, tokens in segments for position in range(tokens)]


def test_as_equal_as_the_engines() -> None:
    rng = random.Random(3)
    prompts = []
    for _ in range(60):
        beginning = prompts[rng.randrange(len(prompts))][: rng.randrange(4)] if prompts else []
        added = [Segment(rng.randrange(1, 6), rng.choice((0, 1, 7, 16, 33, 100))) for _ in range(rng.randrange(1, 4))]
        prompts.append([*beginning, *added])
    salted = [(prompt, salt) for prompt in prompts for salt in (1, 2)]
    ours = [segment_names(prompt, 16, salt) for prompt, salt in salted]
    theirs = [block_names(text(prompt), 16, str(salt)) for prompt, salt in salted]
    for index, (mine, real) in enumerate(zip(ours, theirs, strict=True)):
        assert len(mine) == len(real)
        for other in range(index):
            equal = [a == b for a, b in zip(mine, ours[other], strict=False)]
            assert equal == [a == b for a, b in zip(real, theirs[other], strict=False)]
    assert len({name for names in ours for name in names}) == len({name for names in theirs for name in names})


def test_a_shorter_segment_is_a_prefix_of_the_longer() -> None:
    whole, part = segment_names([Segment(1, 160)], 16), segment_names([Segment(1, 50), Segment(2, 110)], 16)
    assert whole[:3] == part[:3]
    assert not set(whole[3:]) & set(part[3:])
