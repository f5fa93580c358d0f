"""The steps for which kernels are built before there are any: layers one by one, with runs that end."""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import torch
from gpu_harness import DEVICE, MODE

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from penstock.engine.adapters.kernel import AdaptedLinear  # noqa: E402
from penstock.engine.adapters.layout import PlacedSite  # noqa: E402
from penstock.engine.adapters.runtime import AdaptedModel  # noqa: E402
from penstock.engine.backends.cuda.warmup import _batch, _cache_of, _forward, _one_layer_each  # noqa: E402
from penstock.engine.backends.interface import StepLimits  # noqa: E402
from penstock.engine.backends.reference.segments import waves_of  # noqa: E402
from penstock.engine.models.decoder import Decoder  # noqa: E402
from tests.engine import tiny  # noqa: E402
from tests.engine.harness import make_engine  # noqa: E402
from tests.engine.tiny import write_checkpoint  # noqa: E402

FULL, SLIDING = "full_attention", "sliding_attention"

LIMITS = StepLimits(4, 64, 256, 16)
SHORT = StepLimits(4, 299, 64, 16)
"""Of an engine whose steps have more tokens than a context."""
FAMILIES = (
    "gemma4-small", "deepseek-v4", "falcon-h1", "qwen3-next", "lfm2-moe", "qwen4-exp", "hrm-text", "glm-dsa", "axk2",
    "hy-v4", "hy-v4-some-dense", "mimo-v2-flash", "laguna", "minimax-m3", "step3.5",
    "mistral-large4", "muse-glimmer", "muse-spark", "glm5-next", "glm5-next-shared",
)  # fmt: skip
STEPS: tuple[tuple[int, list[int]], ...] = ((1, []), (4, []), (0, [17]), (1, [17]), (1, [20] * 3))


def test_layers_run_alone_whatever_they_share_with_others() -> None:
    """Keys and values of another layer, vectors of the token, states, two mixers; the CPU's operations will do."""
    if MODE == "compile":
        return
    tables, few = torch.zeros(5, 16, dtype=torch.int32), torch.zeros(5, 4, dtype=torch.int32)
    for family in known(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            decoder = make_engine(write_checkpoint(family, Path(folder)), num_blocks=40).runner.decoder
        with torch.inference_mode():
            for layer in decoder.layers:
                alone = decoder.alone(layer)
                cache = _cache_of(alone, torch.float32, LIMITS)
                for decodes, prompts in STEPS:
                    made = _forward(alone, cache, tables, LIMITS, decodes, prompts)
                    assert made.shape == (decodes + sum(prompts), decoder.config.hidden_size), family
                for decodes in (0, 1):
                    assert len(_forward(alone, cache, few, SHORT, decodes, [299])) == decodes + 299, family
                if decoder.captured_context is not None:
                    made = _forward(alone, cache, tables, LIMITS, 2, [17], longest=LIMITS.max_context)
                    assert len(made) == 19, family


def test_steps_are_cut_into_their_runs() -> None:
    """Layers with states that run in PyTorch go through a step sequence by sequence."""
    tables = torch.zeros(5, 16, dtype=torch.int32, device=DEVICE)
    for decodes, prompts in STEPS:
        (wave,) = waves_of(_batch(decodes, prompts, tables, LIMITS), alone=False)
        singles = [] if wave.singles is None else [(at, at + 1) for at in wave.singles.at.tolist()]
        ends = list(itertools.accumulate([1] * decodes + prompts))
        assert singles + [(run.begin, run.end) for run in wave.runs] == list(zip([0, *ends], ends, strict=False))


def test_adapters_are_visited_in_layers_of_every_kind() -> None:
    """Experts, delta nets, and heads of other sizes, which layers between the first and the last one may have alone."""
    if MODE == "compile":
        return
    families = ("llama-gqa", "qwen3-next", "hrm-text", "hy-v4-some-dense", "laguna", "minimax-m3", "step3.5")
    for family in known((*families, "mistral-large4", "muse-glimmer", "muse-spark", "glm5-next-shared")):
        changes = {"layer_types": [FULL, SLIDING, FULL]} if family == "step3.5" else {}
        with tempfile.TemporaryDirectory() as folder:
            path = write_checkpoint(family, Path(folder), **changes)
            runtime = make_engine(path, num_blocks=40, adapter_slots=1).runner.adapters
        assert runtime is not None
        model = runtime.model
        wanted = {site_shape(placed) for decoder in decoders_of(model) for placed in placed_in(decoder)}
        visited = [placed for decoder in _one_layer_each(model) for placed in placed_in(decoder)]
        assert {site_shape(placed) for placed in visited} == wanted, family


def known(families: tuple[str, ...]) -> list[str]:
    """Those that the library here has."""
    return [family for family in families if family in tiny.FAMILIES]


def decoders_of(model: AdaptedModel) -> list[Decoder]:
    return [model.decoder] if model.further is None else [model.decoder, model.further]


def placed_in(decoder: Decoder) -> list[PlacedSite]:
    """Where adapters are added to the linears of attention."""
    linears = [linear for layer in decoder.layers for linear in layer.mixer.linears]
    return [linear._placed for linear in linears if isinstance(linear, AdaptedLinear)]


def site_shape(placed: PlacedSite) -> tuple[object, ...]:
    return placed.site.sizes, placed.site.inputs
