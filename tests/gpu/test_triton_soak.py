"""The soak on CUDA: overlap, graphs, streams and everything else at once, against each request alone.

`penstock bench soak --device cuda` is the same with real grammars; here they need no library.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from test_triton_masks import CycleCompiler  # noqa: E402

from penstock.bench.soak.run import Report, Soak, SoakSettings  # noqa: E402
from penstock.bench.soak.traffic import Form  # noqa: E402

ON_DEVICE = torch.cuda.is_available() and os.environ.get("PENSTOCK_GPU_TESTS") != "compile"


def follows(tokens: list[int]) -> bool:
    return all(token % 7 == 3 * at % 7 for at, token in enumerate(tokens))


def soak(device: str, seed: int, minutes: float, rounds: int | None = None) -> Report:
    forms = [Form(f"a cycle of {count}", str(count), follows) for count in (1, 9, 30)]
    settings = SoakSettings(seed=seed, minutes=minutes, rounds=rounds, device=device)
    return Soak(settings, forms, CycleCompiler, lambda report, what: None).run()


def test_a_soak_of_everything() -> None:
    if not ON_DEVICE:
        return
    report = soak("cuda", seed=21, minutes=1.0)
    print(f"  soak: {report}")
    assert not report.missing, report
    assert report.ties < report.requests / 20, report
