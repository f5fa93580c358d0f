"""The offload benchmark measures what it says: one kind of request computes its prompt, the other brings it back."""

from pathlib import Path

import pytest

from penstock.bench import offload
from penstock.bench.engine import BenchError
from penstock.engine import restores
from penstock.engine.backends.reference.backend import ReferenceBackend
from tests.engine.harness import assert_idle, make_engine
from tests.engine.tiny import write_checkpoint


def test_returns_come_from_the_host_and_others_from_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint("llama-gqa", tmp_path)
    engine = make_engine(folder, num_blocks=18, host_memory=8 << 20)
    times = offload.measure(engine, 199, 240, repeat=2)
    assert len(times.computed) == len(times.returned) == 2 and times.ratio > 0
    assert times.restored_tokens == 240
    assert engine.load_snapshot().restored_blocks > 3 * 13, "the device held much of it"
    with pytest.raises(BenchError, match="came back"):
        offload.measure(make_engine(folder, num_blocks=18), 199, 240, repeat=1)


def test_streams_wait_for_no_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "restore_step_bytes", 1)
    monkeypatch.setattr(restores, "MOST_PIECES", 1)
    engine = make_engine(write_checkpoint("llama-gqa", tmp_path), num_blocks=18 + 2 * 33, host_memory=8 << 20)
    gaps = offload.measure_gaps(engine, 199, 900, repeat=1, streams=2)
    assert len(gaps.longest) == len(gaps.returned) == 1 and 0 < gaps.usual <= gaps.longest[0]
    assert engine.load_snapshot().host_restores == 2, "none came back in one step"
    assert_idle(engine)
