"""Norms and gates may hand their results on in a form that quantized linears alone understand, as on CUDA with FP8:
whatever reads them too must then be such a linear, or come behind plain ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.backends.backend import WeightPlan
from penstock.engine.backends.reference.backend import ReferenceBackend
from penstock.engine.backends.reference.ops import ReferenceOps
from penstock.engine.models.weights import Weights, of_ends
from penstock.engine.startup import part
from tests.engine.harness import generate, greedy, make_engine
from tests.engine.tiny import write_checkpoint


@dataclass(frozen=True)
class Scaled:
    data: Tensor


class ScaledOps:
    """See `ActivationOps`."""

    def __init__(self) -> None:
        self._plain = ReferenceOps()

    def __getattr__(self, name: str) -> Any:
        made = getattr(self._plain, name)
        return made if name == "pointwise" else lambda *args, **kwargs: Scaled(made(*args, **kwargs))


class QuantizedLinear:
    """Takes both forms."""

    def __init__(self, dense: Any) -> None:
        self._dense = dense
        self.weight_bytes = dense.weight_bytes

    def __call__(self, x: Tensor | Scaled) -> Tensor:
        y: Tensor = self._dense(x.data if isinstance(x, Scaled) else x)
        return y


class ScalingBackend(ReferenceBackend):
    calibrates = False

    def plan_weights(self, *args: Any) -> WeightPlan:
        return WeightPlan(self._quantize, ScaledOps())

    def _quantize(
        self, weights: Weights, names: dict[str, int], inputs: int, bias: Tensor | None
    ) -> QuantizedLinear | None:
        if of_ends(names):
            return None
        dense = torch.cat([weights.tensor(name, self.device).float() for name in names])
        return QuantizedLinear(self.linear(dense, bias))


@pytest.mark.parametrize(
    "family",
    [
        "llama-gqa", "gemma2", "qwen3-moe", "afmoe", "deepseek-v3", "deepseek-v32", "qwen3-next", "gpt-oss", "axk2",
        "hy-v4", "hrm-text", "deepseek-v4", "qwen4-exp", "kimi-linear", "granite4-hybrid", "falcon-h1", "nemotron-h",
        "lfm2-moe", "gemma4-small", "gemma4-experts", "cohere2", "phi", "llama4", "mimo-v2-flash", "laguna",
        "laguna-elements", "minimax-m3", "step3.5", "mistral-large4", "muse-glimmer", "muse-spark", "glm5-next",
    ],
)  # fmt: skip
def test_linears_that_stay_dense_get_plain_numbers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(family, tmp_path)
    request = greedy("r", [i * 7 % 199 for i in range(70)], 4)
    expected = generate(make_engine(folder), request)
    monkeypatch.setattr(part, "pick_backend", lambda device, threads: ScalingBackend())
    assert generate(make_engine(folder), request) == expected
