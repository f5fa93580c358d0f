"""Tiny EAGLE-3 heads in both published layouts, and what they must draft, in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine.core import Engine
from penstock.engine.speculative.head_proposer import HeadProposer

VOCAB, DRAFT_VOCAB, HIDDEN, HEADS, KV_HEADS, FFN = 199, 120, 64, 4, 2, 96
LAYER: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
TAPPED = (1, 2, 3)


def head_tensors(
    prefix: str,
    *,
    embeds: bool,
    draft_vocab: int = DRAFT_VOCAB,
    hidden: int = HIDDEN,
    seed: int = 0,
    spread: float = 0.15,
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random) * spread

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=random)

    dim = hidden // HEADS
    found = {
        "fc.weight": matrix(hidden, len(TAPPED) * HIDDEN),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(draft_vocab, hidden),
        f"{prefix}hidden_norm.weight": norm(hidden),
        f"{prefix}input_layernorm.weight": norm(hidden),
        f"{prefix}post_attention_layernorm.weight": norm(hidden),
        f"{prefix}self_attn.q_proj.weight": matrix(HEADS * dim, 2 * hidden),
        f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * dim, 2 * hidden),
        f"{prefix}self_attn.v_proj.weight": matrix(KV_HEADS * dim, 2 * hidden),
        f"{prefix}self_attn.o_proj.weight": matrix(hidden, HEADS * dim),
        f"{prefix}mlp.gate_proj.weight": matrix(FFN, hidden),
        f"{prefix}mlp.up_proj.weight": matrix(FFN, hidden),
        f"{prefix}mlp.down_proj.weight": matrix(hidden, FFN),
    }
    if embeds:
        found["embed_tokens.weight"] = matrix(VOCAB, hidden) * 8
    if draft_vocab < VOCAB:
        chosen = torch.randperm(VOCAB, generator=random)[:draft_vocab].sort().values
        found["d2t"] = chosen - torch.arange(draft_vocab)
        found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, chosen, True)
    return found


def write_original(folder: Path, *, pickled: bool = False, **tensors: Any) -> Path:
    """`midlayer.*`, with the target's embedding."""
    folder.mkdir(parents=True, exist_ok=True)
    found = head_tensors("midlayer.", embeds=False, **tensors)
    config = {
        **LAYER,
        "draft_vocab_size": len(found["lm_head.weight"]),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPPED), "use_aux_hidden_state": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(found, folder / "pytorch_model.bin")
    else:
        save_file(found, folder / "model.safetensors")
    return folder


def write_speculators(
    folder: Path, *, norm_before_residual: bool = True, hidden: int = HIDDEN, layer: dict[str, Any] | None = None,
    **tensors: Any,
) -> Path:  # fmt: skip
    """`layers.0.*`, with an embedding of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    found = head_tensors("layers.0.", embeds=True, hidden=hidden, **tensors)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "draft_vocab_size": len(found["lm_head.weight"]),
        "norm_before_residual": norm_before_residual,
        "target_hidden_size": HIDDEN,
        "eagle_aux_hidden_state_layer_ids": list(TAPPED),
        "transformer_layer_config": {**LAYER, "hidden_size": hidden, "head_dim": hidden // HEADS, **(layer or {})},
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy", "verifier": {}},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(found, folder / "model.safetensors")
    return folder


def write_head(layout: str, folder: Path, **changes: Any) -> Path:
    return {"original": write_original, "speculators": write_speculators}[layout](folder, **changes)


def noted_drafts(engine: Engine) -> list[tuple[list[int], list[int]]]:
    """Fills with the tokens before each draft and the draft, while the engine runs."""
    found: list[tuple[list[int], list[int]]] = []
    proposer = engine.speculation.proposer  # type: ignore[union-attr]
    assert isinstance(proposer, HeadProposer)
    propose = proposer.propose

    def noting(depths: dict[Any, int]) -> dict[Any, list[int]]:
        drafts = propose(depths)
        found.extend((list(seq.tokens), list(draft)) for seq, draft in drafts.items())
        return drafts

    proposer.propose = noting  # type: ignore[method-assign]
    return found


class PlainHead:
    """A head as its papers and first implementations define it: no cache, no batches, every entry computed anew."""

    def __init__(self, folder: Path, target: Path) -> None:
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        bin_file = folder / "pytorch_model.bin"
        self.tensors = torch.load(bin_file) if bin_file.exists() else load_file(folder / "model.safetensors")
        self.prefix = "midlayer." if "midlayer.hidden_norm.weight" in self.tensors else "layers.0."
        self.normed_residual = bool(config.get("norm_before_residual", False))
        layer = config.get("transformer_layer_config", config)
        self.eps, self.theta = layer["rms_norm_eps"], layer["rope_theta"]
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, attn_implementation="eager")
        self.embedding = self.tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight.detach())
        rows = len(self.tensors["lm_head.weight"])
        self.tokens = torch.arange(rows) + self.tensors.get("d2t", torch.zeros(rows, dtype=torch.int64))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        dim = x.shape[-1]
        inverse = self.theta ** (-torch.arange(0, dim, 2) / dim)
        angles = torch.arange(len(x))[:, None] * inverse
        cos, sin = angles.cos().repeat(1, 2)[:, None], angles.sin().repeat(1, 2)[:, None]
        half = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
        return x * cos + half * sin

    def layer(self, token_ids: list[int], features: Tensor) -> Tensor:
        """Hidden states before the last norm, of entries (token, hidden state before it)."""
        p = self.prefix
        hidden = self.norm(features, f"{p}hidden_norm")
        residual = hidden if self.normed_residual else features
        x = torch.cat((self.norm(self.embedding[token_ids], f"{p}input_layernorm"), hidden), -1)
        count = len(token_ids)
        q, k, v = (
            self.linear(x, f"{p}self_attn.{name}_proj").view(count, heads, -1)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
        residual = residual + self.linear(mixed, f"{p}self_attn.o_proj")
        x = self.norm(residual, f"{p}post_attention_layernorm")
        gate = torch.nn.functional.silu(self.linear(x, f"{p}mlp.gate_proj")) * self.linear(x, f"{p}mlp.up_proj")
        return residual + self.linear(gate, f"{p}mlp.down_proj")

    def draft(self, tokens: list[int], count: int) -> list[int]:
        """Greedy draft tokens behind `tokens`."""
        return self._drafts(tokens, count, [])

    def draft_given(self, tokens: list[int], known: list[int], step: int) -> int:
        """The draft token behind `tokens` and the first of `known`, taken for draft tokens."""
        return self._drafts(tokens, step + 1, known)[-1]

    @torch.no_grad()
    def _drafts(self, tokens: list[int], count: int, known: list[int]) -> list[int]:
        states = self.model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
        features = self.linear(torch.cat([states[at][0] for at in TAPPED], -1), "fc")
        entries = tokens[1:]
        drafts: list[int] = []
        while True:
            out = self.layer(entries, features)
            scores = self.linear(self.norm(out[-1], "norm"), "lm_head")
            drafts.append(int(self.tokens[scores.argmax()]))
            if len(drafts) == count:
                return drafts
            entries = [*entries, known[len(drafts) - 1] if known else drafts[-1]]
            features = torch.cat((features, out[-1:]))
