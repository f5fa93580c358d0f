"""Tiny models with an MTP layer, in both layouts, and what it must draft, from the reference's own layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.tiny import write_checkpoint
from tests.engine.tiny.checkpoints import AutoModelForCausalLM

ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "full_attention_interval": 1}


def write_mtp(family: str, folder: Path) -> Path:
    """A model with an MTP layer: that of a second model of one layer."""
    target = write_checkpoint(family, folder / "target", spread=0.3)
    config = json.loads((target / "config.json").read_text())
    changes = {key: value for key, value in ONE_LAYER.items() if key in config or key == "full_attention_interval"}
    indexed = "index_topk" in config
    step = family.startswith("step")
    if step:  # as published: dense, with a window
        changes |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
        changes |= dict.fromkeys(("swiglu_limits", "swiglu_limits_shared"))
    elif "layer_types" in config:
        changes["layer_types"] = ["indexed_attention" if indexed else "full_attention"]
    if "mlp_layer_types" in config and not step:
        changes["mlp_layer_types"] = ["sparse"]
    if "indexer_types" in config:
        changes["indexer_types"] = ["full"]
    qwen = family.startswith("qwen")
    if not qwen:
        changes.pop("full_attention_interval")
    layer = load_file(write_checkpoint(family, folder / "layer", spread=0.3, **changes) / "model.safetensors")
    random = torch.Generator().manual_seed(1)
    hidden, offset = config["hidden_size"], float(not qwen and not step)

    def norm() -> Tensor:
        return offset + 0.2 * torch.randn(hidden, generator=random)

    at = "mtp." if qwen else f"model.layers.{config['num_hidden_layers']}."
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
    if not qwen:
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
    prefix = "mtp.layers.0." if qwen else at
    tensors = load_file(target / "model.safetensors")
    found = {name: value for name, value in layer.items() if name.startswith("model.layers.0.")}
    tensors |= {name.replace("model.layers.0.", prefix): value for name, value in found.items()}
    for name in (names[0], names[1], names[3]):
        tensors[f"{at}{name}.weight"] = norm()
    tensors[f"{at}{names[2]}.weight"] = 0.15 * torch.randn(hidden, 2 * hidden, generator=random)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    # Qwen's own key for their number, `mtp_num_hidden_layers`, is one that the reference does not have.
    more: dict[str, Any] = {} if qwen else {"num_nextn_predict_layers": 1}
    more |= {"mtp_layer_types": ["sliding_attention"]} if step else {}
    (target / "config.json").write_text(json.dumps({**config, **more}))
    layer["model.norm.weight"] = tensors[f"{at}{names[3]}.weight"]
    save_file(layer, folder / "layer" / "model.safetensors", metadata={"format": "pt"})
    return target


class PlainMtp:
    """The reference's model, and its layer in a model of its own."""

    def __init__(self, target: Path) -> None:
        def load(folder: Path) -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

        self.model, self.layer = load(target), load(target.parent / "layer")
        tensors = load_file(target / "model.safetensors")
        at = next(name for name in tensors if name.endswith(("eh_proj.weight", "mtp.fc.weight"))).rpartition(".weight")[
            0
        ]
        self.combine = tensors[f"{at}.weight"]
        at = at.rpartition(".")[0]
        names = (
            ("enorm", "hnorm") if "eh_proj" in str(list(tensors)) else ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
        )
        offset = names[0] != "enorm" or self.model.config.model_type == "step3p5"
        self.norms = [tensors[f"{at}.{name}.weight"] + offset for name in names]
        self.eps = self.model.config.rms_norm_eps
        self.before_norm = self.model.config.model_type == "step3p5"

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    @torch.no_grad()
    def draft(self, tokens: list[int], count: int) -> list[int]:
        embedding = self.model.get_input_embeddings().weight
        features = states(self.model.model, before_norm=self.before_norm, input_ids=torch.tensor([tokens[:-1]]))[1]
        entries, drafts = tokens[1:], []
        while True:
            parts = self.norm(embedding[entries], self.norms[0]), self.norm(features, self.norms[1])
            stream = torch.cat(parts, -1) @ self.combine.T
            out, kept = states(self.layer.model, before_norm=self.before_norm, inputs_embeds=stream[None])
            drafts.append(int(self.model.lm_head(out[-1]).argmax()))
            if len(drafts) == count:
                return drafts
            entries, features = [*entries, drafts[-1]], torch.cat((features, kept[-1:]))


def states(model: Any, *, before_norm: bool, **inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Final hidden states of a decoder, and what is read of them: the same, or what its last norm was given."""
    given: list[Tensor] = []
    hook = model.norm.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    out: Tensor = model(**inputs, use_cache=False).last_hidden_state[0]
    hook.remove()
    return out, given[-1][0] if before_norm else out
