"""PyTorch is imported without the kernels that engines never use, and they are there for those who do."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import sys
from penstock.engine.torch_import import import_torch, with_meta_kernels
import_torch()
import torch
kernels = "torch._meta_registrations"
assert kernels not in sys.modules and not hasattr(torch, "_meta_registrations")
assert torch.rand(2, generator=torch.Generator().manual_seed(1)).shape == (2,)
weight = torch.ones(2, 2, device="meta")
assert (weight @ weight).shape == (2, 2) and torch.ones(2, 2).topk(1).values.shape == (2, 1)
with_meta_kernels()
assert torch.rand(2, generator=torch.Generator().manual_seed(1)).shape == (2,)
assert hasattr(sys.modules[kernels], "register_meta") and torch._meta_registrations is sys.modules[kernels]
assert torch.ones(3, 3, device="meta").topk(2).values.shape == (3, 2)
import_torch()
from torch._subclasses import FakeTensorMode
with FakeTensorMode():
    assert torch.nn.functional.embedding(torch.zeros(4, dtype=torch.int64), torch.ones(5, 6)).shape == (4, 6)
"""


def test_kernels_of_tensors_without_storage_are_imported_when_asked_for() -> None:
    ran = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
