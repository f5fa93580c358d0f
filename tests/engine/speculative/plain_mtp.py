"""MTP layers that no library computes, in plain PyTorch: what the published checkpoints hold and the engines that serve
them compute. No cache and no batches: every entry is computed anew."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from tests.engine.tiny import write_checkpoint
from tests.engine.tiny.checkpoints import AutoModelForCausalLM

SPREAD = 0.15
KNOWN = 48
"""Tokens of models whose next token is known: fewer than a hidden state has numbers."""


def known_after(token: int) -> int:
    return (5 * token + 3) % KNOWN


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


class PlainDrafter(ABC):
    """A tiny model with an MTP layer, as it is published."""

    ONE: float = 1.0
    """What norm weights of 1 are stored as."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.model = loaded(folder)
        self.embedding: Tensor = self.model.get_input_embeddings().weight
        self.eps: float = self.config["rms_norm_eps"]
        self._seen: list[int] = []
        self._features = torch.empty(0)
        """Of these tokens, and of all that they begin with."""

    @classmethod
    @abstractmethod
    def tensors_of(cls, config: dict[str, Any], random: torch.Generator) -> dict[str, Tensor]:
        """Those of the layer, by their published names."""

    @classmethod
    def write(cls, family: str, folder: Path, **changes: Any) -> Path:
        target = write_checkpoint(family, folder, spread=0.3, **changes)
        config = json.loads((target / "config.json").read_text())
        tensors = load_file(target / "model.safetensors")
        tensors |= cls.tensors_of(config, torch.Generator().manual_seed(1))
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    @classmethod
    def write_knowing(cls, family: str, folder: Path, part: str) -> Path:
        """A model whose next token follows from the last one alone, and a layer that has learned it: from the token, or
        from the hidden states before it, which tell that token."""
        target = cls.write(family, folder, vocab_size=KNOWN)
        config = json.loads((target / "config.json").read_text())
        tensors = load_file(target / "model.safetensors")
        hidden = config["hidden_size"]
        for name, tensor in tensors.items():
            if ".o_proj." in name or ".o_b_proj." in name or ".down_proj" in name or ".wo_b." in name or ".w2." in name:
                tensor.zero_()  # what attention and feed-forwards give
            if "norm" in name:
                tensor.fill_(cls.ONE)
        rows = torch.linalg.qr(torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(2)))[0][:KNOWN]
        after = torch.tensor([known_after(token) for token in range(KNOWN)])
        tensors["model.embed_tokens.weight"] = rows.contiguous()
        tensors["head.weight" if "head.weight" in tensors else "lm_head.weight"] = (
            8 * rows[after.argsort()].contiguous()
        )
        cls.combine(tensors, part, torch.eye(hidden) if part == "embedding" else rows[after].T @ rows)
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    @classmethod
    @abstractmethod
    def combine(cls, tensors: dict[str, Tensor], part: str, matrix: Tensor) -> None:
        """Have the layer's input be that matrix times the normalized embedding, or hidden states, and nothing else."""

    @abstractmethod
    def features(self, tokens: list[int]) -> Tensor:
        """What the model's hidden states give the layer, of every token."""

    @abstractmethod
    def layer(self, entries: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Of entries, tokens and the features of the ones before them: hidden states for the head, and features."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight

    @torch.no_grad()
    def scores(self, tokens: list[int], drafts: list[int]) -> Tensor:
        """The logits that each of `drafts` was drawn from, behind `tokens`."""
        if self._seen[: len(tokens) - 1] != tokens[:-1]:
            self._seen, self._features = tokens[:-1], self.features(tokens[:-1])
        features, entries, found = self._features[: len(tokens) - 1], tokens[1:], []
        for draft in drafts:
            out, kept = self.layer(entries, features)
            found.append(self.model.lm_head(out[-1]))
            entries, features = [*entries, draft], torch.cat((features, kept[-1:]))
        return torch.stack(found)

    def input_of(self, module: nn.Module, tokens: list[int]) -> Tensor:
        """What a part of the model is given."""
        given: list[Tensor] = []
        hook = module.register_forward_pre_hook(lambda _, args: given.append(args[0]))
        self.model.model(torch.tensor([tokens]), use_cache=False)
        hook.remove()
        return given[-1][0]


def matrices(random: torch.Generator, shapes: dict[str, tuple[int, ...]], norms: dict[str, int]) -> dict[str, Tensor]:
    found = {name: SPREAD * torch.randn(shape, generator=random) for name, shape in shapes.items()}
    return found | {name: 1 + 0.2 * torch.randn(size, generator=random) for name, size in norms.items()}


def side_by_side(part: str, matrix: Tensor) -> Tensor:
    """One matrix for the embedding and hidden states, of which it reads one."""
    halves = (matrix, torch.zeros_like(matrix))
    return torch.cat(halves if part == "embedding" else halves[::-1], 1)


def rotate(x: Tensor, positions: Tensor, size: int, theta: float) -> Tensor:
    """The first `size` numbers of every head of [T, heads, dim], halves against each other."""
    angles = positions[:, None] * theta ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., : size // 2], x[..., size // 2 : size]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., size:]), -1)


class PlainMimo(PlainDrafter):
    """MiMo-V2-Flash: `model.mtp.layers.0`, a dense layer with a window and sinks, between the residual stream and its
    own norm."""

    AT = "model.mtp.layers.{}."

    @classmethod
    def tensors_of(cls, config: dict[str, Any], random: torch.Generator) -> dict[str, Tensor]:
        hidden, ffn, heads = (config[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads"))
        kv_heads, dim, value = 2 * config["num_key_value_heads"], config["head_dim"], config["v_head_dim"]
        found: dict[str, Tensor] = {}
        for layer in range(3):
            at = cls.AT.format(layer)
            shapes: dict[str, tuple[int, ...]] = {
                "eh_proj.weight": (hidden, 2 * hidden), "self_attn.q_proj.weight": (heads * dim, hidden),
                "self_attn.k_proj.weight": (kv_heads * dim, hidden), "self_attn.attention_sink_bias": (heads,),
                "self_attn.v_proj.weight": (kv_heads * value, hidden), "mlp.gate_proj.weight": (ffn, hidden),
                "self_attn.o_proj.weight": (hidden, heads * value), "mlp.up_proj.weight": (ffn, hidden),
                "mlp.down_proj.weight": (hidden, ffn),
            }  # fmt: skip
            norms = ("enorm", "hnorm", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
            made = matrices(random, shapes, {f"{name}.weight": hidden for name in norms})
            found |= {f"{at}{name}": tensor for name, tensor in made.items()}
        return found

    @classmethod
    def combine(cls, tensors: dict[str, Tensor], part: str, matrix: Tensor) -> None:
        tensors[f"{cls.AT.format(0)}eh_proj.weight"] = side_by_side(part, matrix)

    def features(self, tokens: list[int]) -> Tensor:
        return self.input_of(self.model.model.norm, tokens)

    def layer(self, entries: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        own = {name.removeprefix(self.AT.format(0)): tensor for name, tensor in self.tensors.items()}
        parts = self.norm(self.embedding[entries], own["enorm.weight"]), self.norm(features, own["hnorm.weight"])
        stream = torch.cat(parts, -1) @ own["eh_proj.weight"].T
        stream = stream + self.attention(self.norm(stream, own["input_layernorm.weight"]), own)
        x = self.norm(stream, own["pre_mlp_layernorm.weight"])
        gate, up = (x @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        stream = stream + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T
        return self.norm(stream, own["final_layernorm.weight"]), stream

    def attention(self, x: Tensor, own: dict[str, Tensor]) -> Tensor:
        config, count = self.config, len(x)
        heads, dim, kv_heads = config["num_attention_heads"], config["head_dim"], 2 * config["num_key_value_heads"]
        rope = config["rope_parameters"]["sliding_attention"]
        size, positions = int(dim * rope["partial_rotary_factor"]), torch.arange(count)
        q, k, v = (
            (x @ own[f"self_attn.{name}_proj.weight"].T).view(count, many, -1)
            for name, many in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = (rotate(each, positions, size, rope["rope_theta"]) for each in (q, k))
        v = v * config["attention_value_scale"]
        k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * dim**-0.5
        distance = positions[:, None] - positions
        scores = scores.masked_fill((distance < 0) | (distance >= config["sliding_window"]), float("-inf"))
        sinks = own["self_attn.attention_sink_bias"].view(-1, 1, 1).expand(-1, count, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return torch.einsum("hqk,khd->qhd", weights, v).reshape(count, -1) @ own["self_attn.o_proj.weight"].T


class OfLibraryLayer(PlainDrafter):
    """Attention and feed-forward of the layer are those that `transformers` has in a model of one layer."""

    LAYER: ClassVar[dict[str, Any]]
    """Its configuration."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.own = loaded(folder.parent / "layer").model

    @classmethod
    def write(cls, family: str, folder: Path, **changes: Any) -> Path:
        layer = write_checkpoint(family, folder / "layer", spread=0.3, **{**changes, **cls.LAYER})
        random = torch.Generator().manual_seed(3)
        own = load_file(layer / "model.safetensors")
        own["model.norm.weight"] = 1 + 0.2 * torch.randn(own["model.norm.weight"].shape, generator=random)
        save_file(own, layer / "model.safetensors", metadata={"format": "pt"})
        target = super().write(family, folder / "target", **changes)
        tensors = load_file(target / "model.safetensors")
        tensors |= {cls.name_of(name): tensor for name, tensor in own.items() if cls.name_of(name)}
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        return target

    @classmethod
    @abstractmethod
    def name_of(cls, name: str) -> str:
        """The published name of a tensor that the layer has in a model of its own; empty if it has not."""

    @classmethod
    def write_layer(cls, target: Path) -> None:
        """Give the layer's own model what the target has."""
        path = target.parent / "layer" / "model.safetensors"
        tensors, own = load_file(target / "model.safetensors"), load_file(path)
        own |= {name: tensors[cls.name_of(name)] for name in own if cls.name_of(name)}
        save_file(own, path, metadata={"format": "pt"})


class PlainV4(OfLibraryLayer):
    """DeepSeek V4: `mtp.0`, a layer of the model's own kind with the window alone, which reads all residual streams as
    the last layer leaves them, and has a head of its own that makes them one."""

    AT = "mtp.0."
    LAYER: ClassVar[dict[str, Any]] = {
        "num_hidden_layers": 1, "layer_types": ["sliding_attention"], "mlp_layer_types": ["moe"],
    }  # fmt: skip

    @classmethod
    def name_of(cls, name: str) -> str:
        if not name.startswith(("model.layers.0.", "model.hc_head.hc_", "model.norm.")):
            return ""
        return cls.AT + name.removeprefix("model.").removeprefix("layers.0.").replace("hc_head.hc_", "hc_head_")

    @classmethod
    def tensors_of(cls, config: dict[str, Any], random: torch.Generator) -> dict[str, Tensor]:
        hidden = config["hidden_size"]
        shapes: dict[str, tuple[int, ...]] = {f"{one}.weight": (hidden, hidden) for one in ("e_proj", "h_proj")}
        made = matrices(random, shapes, {f"{one}.weight": hidden for one in ("enorm", "hnorm")})
        return {f"{cls.AT}{name}": tensor for name, tensor in made.items()}

    @classmethod
    def combine(cls, tensors: dict[str, Tensor], part: str, matrix: Tensor) -> None:
        tensors[f"{cls.AT}e_proj.weight"] = matrix * (part == "embedding")
        tensors[f"{cls.AT}h_proj.weight"] = matrix * (part == "hidden")

    def features(self, tokens: list[int]) -> Tensor:
        return self.input_of(self.model.model.hc_head, tokens)

    def layer(self, entries: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        own = {name.removeprefix(self.AT): tensor for name, tensor in self.tensors.items()}
        of_token = self.norm(self.embedding[entries], own["enorm.weight"]) @ own["e_proj.weight"].T
        of_hidden = self.norm(features, own["hnorm.weight"]) @ own["h_proj.weight"].T
        streams, given = (of_token.unsqueeze(1) + of_hidden).unsqueeze(0), []
        hooks = [
            self.own.layers[0].register_forward_pre_hook(lambda _, args: (streams, *args[1:])),
            self.own.hc_head.register_forward_pre_hook(lambda _, args: given.append(args[0])),
        ]
        out = self.own(torch.tensor([entries]), use_cache=False).last_hidden_state[0]
        for hook in hooks:
            hook.remove()
        return out, given[-1][0]


class PlainGlm5Next(OfLibraryLayer):
    """GLM-5-Next: behind the last layer, one with attention to chosen pools and experts around a single residual
    stream, which reads the model's final hidden states."""

    AT = "model.layers.5."
    LAYER: ClassVar[dict[str, Any]] = {
        "num_hidden_layers": 1, "layer_types": ["indexed_attention"], "mlp_layer_types": ["sparse"],
        "indexer_types": ["full"],
    }  # fmt: skip

    @classmethod
    def name_of(cls, name: str) -> str:
        if name == "model.norm.weight":
            return f"{cls.AT}shared_head.norm.weight"
        own = name.startswith("model.layers.0.") and ".hc_" not in name
        return name.replace("model.layers.0.", cls.AT) if own else ""

    @classmethod
    def tensors_of(cls, config: dict[str, Any], random: torch.Generator) -> dict[str, Tensor]:
        hidden = config["hidden_size"]
        norms = {f"{one}.weight": hidden for one in ("enorm", "hnorm")}
        made = matrices(random, {"eh_proj.weight": (hidden, 2 * hidden)}, norms)
        return {f"{cls.AT}{name}": tensor for name, tensor in made.items()}

    @classmethod
    def combine(cls, tensors: dict[str, Tensor], part: str, matrix: Tensor) -> None:
        tensors[f"{cls.AT}eh_proj.weight"] = side_by_side(part, matrix)

    def features(self, tokens: list[int]) -> Tensor:
        out: Tensor = self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
        return out

    def layer(self, entries: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        own = {name.removeprefix(self.AT): tensor for name, tensor in self.tensors.items()}
        parts = self.norm(self.embedding[entries], own["enorm.weight"]), self.norm(features, own["hnorm.weight"])
        stream, layer = (torch.cat(parts, -1) @ own["eh_proj.weight"].T).unsqueeze(0), self.own.layers[0]
        every = torch.ones(1, len(entries), dtype=torch.bool)
        stream = stream + layer.self_attn(layer.input_layernorm(stream), attention_mask=every)[0]
        stream = stream + layer.mlp(layer.post_attention_layernorm(stream))
        out = self.norm(stream[0], own["shared_head.norm.weight"])
        return out, out


PLAIN: dict[str, type[PlainDrafter]] = {
    "mimo-v2-flash": PlainMimo,
    "deepseek-v4": PlainV4,
    "glm5-next": PlainGlm5Next,
}
"""Of tiny models."""
