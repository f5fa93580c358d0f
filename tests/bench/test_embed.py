"""`penstock bench embed`: both sides encode the same texts, agree, and are compared."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from penstock.bench import embed


def test_lengths_are_those_of_a_search_index_and_always_the_same() -> None:
    found = embed.lengths(1000, 256)
    assert found == embed.lengths(1000, 256)
    assert min(found) >= 4 and max(found) == 256
    assert 30 < sorted(found)[500] < 50


def test_both_sides_run_and_the_ratio_is_printed(encoder_model: Path, tmp_path: Path) -> None:
    out = io.StringIO()
    settings = embed.EmbedBenchSettings(model=str(encoder_model), texts=6, batch=3, rounds=1, threads=1)
    embed.main(settings, tmp_path / "figures.json", Console(file=out, width=120))
    assert "Penstock" in out.getvalue() and "transformers, batches of 3" in out.getvalue()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["results"]["ratio"] > 0 and figures["results"]["apart"] < 1e-5
