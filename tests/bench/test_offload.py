"""The offload benchmark measures what it says: one kind of request computes its prompt, the other brings it back."""

from pathlib import Path

import pytest

from penstock.bench import offload
from penstock.bench.engine import BenchError
from tests.engine.harness import make_engine
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
