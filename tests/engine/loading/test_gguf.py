"""GGUF files are read completely and quickly, and a damaged one is an error, never a crash."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.loading.gguf import BLOCK, GGMLType, GGUFFile, gguf_in
from penstock.errors import CheckpointError
from tests.engine.loading.gguf_files import write_gguf

METADATA = {
    "general.architecture": "llama",
    "general.name": "tiny – ü",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.5,
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.tokens": ["<s>", "Ġa", "日本", ""],
    "tokenizer.ggml.scores": [0.0, -1.5, -2.0, 3.0],
    "tokenizer.ggml.token_type": [3, 1, 1, 1],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "a.weight": rng.standard_normal((4, 64), dtype=np.float32),
        "b.weight": rng.standard_normal((3, 5), dtype=np.float32).astype(np.float16),
        "c.weight": rng.standard_normal((2, 32), dtype=np.float32),
    }
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return write_gguf(path, METADATA, tensors, {"c.weight": gguf.GGMLQuantizationType.Q8_0})


def test_metadata_comes_back_as_written(small: Path) -> None:
    metadata = GGUFFile(small).metadata
    for key, value in METADATA.items():
        found = metadata[key]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value
    assert "no.such.key" not in metadata


@pytest.mark.parametrize("which", ["small", pytest.param("default_model", marks=pytest.mark.slow)])
def test_every_key_equals_the_reference_reader(which: str, request: pytest.FixtureRequest) -> None:
    """Theirs takes seconds for a vocabulary."""
    path: Path = request.getfixturevalue(which)
    reference = gguf.GGUFReader(path)
    ours = GGUFFile(path)
    theirs = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    found = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in ours.metadata.items()}
    assert found == theirs
    assert {name: (info.type, info.shape) for name, info in ours.tensors.items()} == {
        tensor.name: (tensor.tensor_type, tuple(int(n) for n in reversed(tensor.shape))) for tensor in reference.tensors
    }
    some = ("a.", "b.", "c.", "blk.0.", "blk.7.", "output_norm")
    for tensor in (tensor for tensor in reference.tensors if tensor.name.startswith(some)):
        assert np.array_equal(ours.raw(tensor.name).data.reshape(-1), tensor.data.view(np.uint8).reshape(-1))


def test_raw_gives_stored_bytes_row_by_row(small: Path) -> None:
    raw = GGUFFile(small).raw("c.weight")
    assert (raw.type, raw.shape, raw.data.shape) == (GGMLType.Q8_0, (2, 32), (2, 34))


def test_block_sizes_equal_the_reference() -> None:
    for kind, sizes in BLOCK.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind.value)] == sizes


@pytest.mark.slow
def test_a_large_vocabulary_is_read_quickly(tmp_path: Path) -> None:
    tokens = [f"token-{index}" for index in range(150_000)]
    merges = [f"a{index} b{index}" for index in range(150_000)]
    path = write_gguf(tmp_path / "big.gguf", {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges})
    opening, reading, one_by_one = [], [], []
    for _ in range(3):
        started = time.thread_time()
        file = GGUFFile(path)
        opened = time.thread_time()
        assert file.metadata["tokenizer.ggml.tokens"] == tokens
        assert file.metadata["tokenizer.ggml.merges"] == merges
        read = time.thread_time()
        with path.open("rb") as plain:
            for _ in range(300_000):
                struct.unpack("<Q", plain.read(8))
                plain.read(4).decode(errors="replace")
        one_by_one.append(time.thread_time() - read)
        opening.append(opened - started)
        reading.append(read - started)
    assert min(opening) < min(one_by_one), "it reads no string by itself"
    assert min(reading) < 3 * min(one_by_one)


def test_reading_metadata_needs_no_torch(small: Path) -> None:
    code = (
        "import sys; from penstock.engine.loading.gguf import GGUFFile; "
        "import penstock.sources.resolve, penstock.text; "
        f"GGUFFile({str(small)!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_file_cut_anywhere_is_refused_with_advice(small: Path, tmp_path: Path) -> None:
    data = small.read_bytes()
    for length in [*range(0, len(data) - 64, 7), len(data) - 40]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"fetch it again|cannot be read"):
            GGUFFile(cut)


@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_damaged_bytes_never_crash_the_reader(small: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, 700))
        content[position] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        file = GGUFFile(damaged)
        for key in file.metadata:
            file.metadata[key]
        for name in file.tensors:
            file.raw(name)
    except CheckpointError:
        pass


def test_deeply_nested_arrays_do_not_exhaust_the_stack(tmp_path: Path) -> None:
    header = b"GGUF" + (3).to_bytes(4, "little") + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"k" + (9).to_bytes(4, "little")
    nested = ((9).to_bytes(4, "little") + (1).to_bytes(8, "little")) * 5000
    path = tmp_path / "nested.gguf"
    path.write_bytes(header + key + nested)
    with pytest.raises(CheckpointError):
        GGUFFile(path)


def test_other_versions_and_files_are_named(tmp_path: Path) -> None:
    old = tmp_path / "old.gguf"
    old.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(CheckpointError, match="version 1"):
        GGUFFile(old)
    big = tmp_path / "big.gguf"
    big.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(CheckpointError, match="big-endian"):
        GGUFFile(big)
    page = tmp_path / "page.gguf"
    page.write_bytes(b"<html>not found</html>")
    with pytest.raises(CheckpointError, match="GGUF mark"):
        GGUFFile(page)
    with pytest.raises(CheckpointError, match="does not exist"):
        GGUFFile(tmp_path / "missing.gguf")


def test_an_unreadable_quantization_is_named_when_it_is_needed(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "iq.gguf", "llama")
    kind = gguf.GGMLQuantizationType.IQ4_XS
    writer.add_tensor("a.weight", np.zeros((1, 136), dtype=np.uint8), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"IQ4_XS.*Q4_K"):
        GGUFFile(tmp_path / "iq.gguf").raw("a.weight")


def test_a_folder_stands_for_its_only_gguf_file(small: Path, tmp_path: Path) -> None:
    assert gguf_in(tmp_path) is None
    (tmp_path / "one.gguf").write_bytes(small.read_bytes())
    assert gguf_in(tmp_path) == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(small.read_bytes())
    with pytest.raises(CheckpointError, match=r"one\.gguf, two\.gguf"):
        gguf_in(tmp_path)
