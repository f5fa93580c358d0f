"""Token vectors kept as bits rank as the vectors themselves do."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.knowledge.late import max_sim, pack, unpack


def unit(rows: np.ndarray) -> np.ndarray:
    return np.asarray(rows / np.linalg.norm(rows, axis=-1, keepdims=True), np.float32)


def test_packing_keeps_directions_and_drops_punctuation() -> None:
    random = np.random.default_rng(0)
    rows, vector = unit(random.standard_normal((4, 384))), unit(random.standard_normal(384))
    data = pack(["oil", ",", "##ing", "cut off later"], rows[:3], vector)
    directions, whole = unpack(data)
    assert directions.shape == (2, 384) and len(data) == 4 + 768 + 2 * 48
    assert np.allclose(np.linalg.norm(directions, axis=1), 1, atol=1e-5)
    assert whole @ vector == pytest.approx(1, abs=1e-3)
    assert directions[0] @ rows[0] > 0.7 and abs(directions[0] @ rows[1]) < 0.3


def test_nothing_matches_nothing() -> None:
    directions, _ = unpack(pack(["..."], np.ones((1, 64), np.float32), np.ones(64, np.float32)))
    assert directions.shape == (0, 64) and max_sim(np.ones((2, 64), np.float32), directions) == 0.0


def test_bits_order_passages_as_numbers_do() -> None:
    random = np.random.default_rng(1)
    question = unit(random.standard_normal((6, 384)))
    passages = [unit(np.concatenate([question[:n], random.standard_normal((20, 384))])) for n in range(7)]
    scores = [max_sim(question, unpack(pack(["w"] * len(rows), rows, rows[0]))[0]) for rows in passages]
    assert scores == sorted(scores)
