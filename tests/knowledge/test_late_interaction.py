"""Token vectors kept as bits rank as the vectors themselves do."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.knowledge.late_interaction import max_sims, pack, unpack


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)


def directions(signs: np.ndarray, width: int) -> np.ndarray:
    return (np.unpackbits(signs, axis=1, count=width) * 2.0 - 1) / math.sqrt(width)


def test_packing_keeps_directions_and_drops_punctuation() -> None:
    random = np.random.default_rng(0)
    rows, vector = unit(random.standard_normal((4, 384))), unit(random.standard_normal(384))
    data = pack(["oil", ",", "##ing", "cut off later"], rows[:3], vector)
    signs, whole = unpack(data)
    assert signs.shape == (2, 48) and len(data) == 4 + 768 + 2 * 48
    assert whole @ vector == pytest.approx(1, abs=1e-3)
    kept = directions(signs, 384)
    assert kept[0] @ rows[0] > 0.7 and abs(kept[0] @ rows[1]) < 0.3


def test_nothing_matches_nothing() -> None:
    empty, _ = unpack(pack(["..."], np.ones((1, 64), np.float32), np.ones(64, np.float32)))
    some, _ = unpack(pack(["word"], np.ones((1, 64), np.float32), np.ones(64, np.float32)))
    question = unit(np.ones((2, 64)))
    assert empty.shape == (0, 8)
    assert max_sims(question, [empty, some, empty]) == [0.0, pytest.approx(1.0), 0.0]
    assert max_sims(question[:0], [some]) == [0.0] and max_sims(question, []) == []


def test_all_passages_at_once_are_what_each_is_by_itself() -> None:
    random = np.random.default_rng(2)
    question = unit(random.standard_normal((5, 100)))
    passages = [np.packbits(random.standard_normal((rows, 100)) >= 0, axis=1) for rows in (3, 1, 40)]
    expected = [float((question @ directions(signs, 100).T).max(axis=1).mean()) for signs in passages]
    assert max_sims(question, passages) == pytest.approx(expected, abs=1e-5)


def test_bits_order_passages_as_numbers_do() -> None:
    random = np.random.default_rng(1)
    question = unit(random.standard_normal((6, 384)))
    passages = [unit(np.concatenate([question[:n], random.standard_normal((20, 384))])) for n in range(7)]
    scores = max_sims(question, [unpack(pack(["w"] * len(rows), rows, rows[0]))[0] for rows in passages])
    assert scores == sorted(scores)
