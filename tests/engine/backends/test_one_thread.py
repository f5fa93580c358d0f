"""PyTorch gets its threads back, whatever happens meanwhile."""

from __future__ import annotations

import pytest
import torch

from penstock.engine.backends.one_thread import one_thread


def test_the_number_of_threads_comes_back() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
        with pytest.raises(ZeroDivisionError), one_thread():
            _ = 1 // 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
