"""What ranks send each other: values come back as they were, and nothing else comes back at all."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.parallel.layout import Place
from penstock.engine.parallel.plain import NotPlain, decode, encode

leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
values = st.recursive(
    leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner), max_leaves=12
)


@given(values)
@settings(max_examples=25, deadline=None)
def test_values_come_back(value: Any) -> None:
    assert decode(encode(value)) == value


def test_records_arrays_and_tensors_come_back() -> None:
    config = EngineConfig("model", adapters=(AdapterSpec("a", "folder", True),), kv_memory=1 << 40)
    sent = config, Place(1, 2, 2), Path("somewhere"), np.float32(0.5), np.int64(3)
    assert decode(encode(sent)) == sent
    for array in (np.arange(6).reshape(2, 3), np.zeros((0, 4), np.float32), np.array([True, False])):
        found = decode(encode(array))
        assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
        found += found  # it can be written to
    for tensor in (torch.randn(2, 3).bfloat16(), torch.tensor(7), torch.zeros(0, 4), torch.randn(4, 4)[:, 1]):
        found = decode(encode(tensor))
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)


class Exploit:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


@given(st.binary(max_size=64))
@settings(max_examples=100, deadline=None)
def test_other_bytes_are_refused(data: bytes) -> None:
    with contextlib.suppress(NotPlain):
        decode(data)


def test_code_is_neither_sent_nor_received(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(NotPlain, match="a Exploit cannot be sent"):
        encode([Exploit()])
    with pytest.raises(NotPlain, match="array of object"):
        encode(np.array([Exploit()]))
    for data in (pickle.dumps(Exploit()), b"c" + encode("Popen") + encode({"args": "true"}), b"", b"l" * 5000):
        with pytest.raises(NotPlain):
            decode(data)
    hostile = b"a" + encode(("|O", (1,))) + encode(b"12345678")
    with pytest.raises(NotPlain):
        decode(hostile)
    assert "it ran" not in capsys.readouterr().out
