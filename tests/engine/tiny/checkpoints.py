"""Tiny checkpoints, written by `transformers` with random weights."""

from __future__ import annotations

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.engine.tiny.common import COMMON
from tests.engine.tiny.families import FAMILIES
from tests.engine.tiny.step3p5 import Step3p5ForCausalLM

# The library lists this decoder only among models that also take images, and releases before 5.18 skip a `register` of
# their own classes.
AutoModelForCausalLM._model_mapping._extra_content[transformers.Mistral4Config] = transformers.Mistral4ForCausalLM
AutoModelForCausalLM._model_mapping._extra_content[transformers.Step3p7TextConfig] = Step3p5ForCausalLM
if hasattr(transformers, "MistralLarge4TextConfig"):
    from tests.engine.tiny.mistral_large4 import MistralLarge4ForCausalLM

    AutoModelForCausalLM._model_mapping._extra_content[transformers.MistralLarge4TextConfig] = MistralLarge4ForCausalLM
if hasattr(transformers, "MuseSparkTextConfig"):
    from tests.engine.tiny.muse import MuseGlimmerForCausalLM, MuseSparkForCausalLM

    AutoModelForCausalLM._model_mapping._extra_content[transformers.MuseGlimmerTextConfig] = MuseGlimmerForCausalLM
    AutoModelForCausalLM._model_mapping._extra_content[transformers.MuseSparkTextConfig] = MuseSparkForCausalLM
if hasattr(transformers, "Glm5NextTextConfig"):
    from tests.engine.tiny.glm5_next import Glm5NextForCausalLM

    AutoModelForCausalLM._model_mapping._extra_content[transformers.Glm5NextTextConfig] = Glm5NextForCausalLM


def write_checkpoint(
    family: str, folder: Path, *, shard_size: str = "5GB", spread: float = 1.0, **changes: Any
) -> Path:
    """A reproducible random checkpoint of `family`, with `changes` to its configuration, as a folder of safetensors.

    With `spread` below 1 the weights are smaller and rounding errors grow less from layer to layer. One that this
    process has written before is copied, and the random generator left as writing it would.
    """
    name, overrides = FAMILIES[family]
    values = {**COMMON, **overrides, **changes}
    make_config = getattr(transformers, name)
    try:
        key = json.dumps([family, name, shard_size, spread, values])
    except TypeError:  # values that have no text
        return _write(family, folder, make_config(**values), shard_size, spread)
    if key not in _WRITTEN:
        kept = _write(family, _shelf() / str(len(_WRITTEN)), make_config(**values), shard_size, spread)
        _WRITTEN[key] = kept, torch.get_rng_state()
    kept, state = _WRITTEN[key]
    torch.set_rng_state(state)
    shutil.copytree(kept, folder, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return folder


_WRITTEN: dict[str, tuple[Path, torch.Tensor]] = {}
"""The folder of each, and the state of the random generator behind it."""


@functools.cache
def _shelf() -> Path:
    """Where this process keeps what it has written; processes that it forks leave it alone."""
    folder, owner = Path(tempfile.mkdtemp(prefix="penstock-tiny-")), os.getpid()
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if os.getpid() == owner else None)
    return folder


def _write(family: str, folder: Path, config: Any, shard_size: str, spread: float) -> Path:
    torch.manual_seed(sum(map(ord, family)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "softmax_scaling" in key:
                parameter.normal_(1 if key.endswith("bias") else 0, 0.2)
            elif key.endswith("bias"):
                parameter.normal_(0, 0.4)
            elif key.endswith("sinks"):
                parameter.normal_(0, 2)
            elif ("norm" in key and "norm.mlp" not in key) or key.endswith(("router.scale", "per_expert_scale")):
                parameter.normal_(1, 0.2)
            elif key.endswith((".A_log", ".D", ".alpha_p", ".alpha_n")):
                parameter.normal_(0, 0.7)
            elif key.endswith("index_kpool_compress_gate"):
                parameter.normal_(0, 0.3)
            elif key.endswith("z_L_init"):
                parameter.normal_(0, 1)
            elif key.endswith(("_hc.base", "hc_head.hc_base", "ple.conv1d.weight", "index_kpool_compress_ape")):
                parameter.normal_(0, 0.5)
            else:
                parameter.mul_(spread)
        for key, buffer in model.named_buffers():
            if key.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
                if family.startswith("axk2"):  # below zero, experts of all other groups are tied
                    buffer.abs_()
            elif key.endswith("rotary_emb.alpha"):
                buffer.normal_(0, 0.3)
            elif key.endswith("layer_scalar"):
                buffer.uniform_(0.6, 1.2)
            elif key.endswith("tid2eid"):
                choices = torch.rand(len(buffer), config.n_routed_experts)
                buffer.copy_(choices.topk(buffer.shape[1]).indices)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder
