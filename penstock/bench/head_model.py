"""An EAGLE-3 head in plain PyTorch, for training: the arithmetic of `engine.speculative.eagle3` over whole texts.

Training-time test: a head drafts several tokens in a row and sees the model's hidden states only before the first of
them, so it is trained the same way. Pass s predicts, behind every token t of a text at once, the token s + 2 places
on: its entry is token t + 1 + s with the hidden state that pass s - 1 gave there, and it attends to the entries of
pass 0 up to t and to its own of the passes before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.engine.models.layers.rotary import cos_sin_table
from penstock.engine.models.model_config import ModelConfig


class HeadModel(nn.Module):
    """See above. Parameters have the names of the speculators layout."""

    def __init__(self, config: ModelConfig, draft_vocab: int, taps: int, positions: int) -> None:
        super().__init__()
        self.rope: Tensor
        hidden, dim = config.hidden_size, config.head_dim
        self.config = config
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.fc = linear(taps * hidden, hidden)
        layer = nn.ModuleDict(
            {
                "input_layernorm": nn.RMSNorm(hidden, config.rms_eps),
                "hidden_norm": nn.RMSNorm(hidden, config.rms_eps),
                "post_attention_layernorm": nn.RMSNorm(hidden, config.rms_eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": linear(2 * hidden, self.heads * dim),
                        "k_proj": linear(2 * hidden, self.kv_heads * dim),
                        "v_proj": linear(2 * hidden, self.kv_heads * dim),
                        "o_proj": linear(self.heads * dim, hidden),
                    }
                ),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": linear(hidden, config.ffn_size),
                        "up_proj": linear(hidden, config.ffn_size),
                        "down_proj": linear(config.ffn_size, hidden),
                    }
                ),
            }
        )
        self.layers = nn.ModuleList([layer])
        self.norm = nn.RMSNorm(hidden, config.rms_eps)
        self.lm_head = linear(hidden, draft_vocab)
        self.register_buffer("rope", cos_sin_table(config.rope, dim, positions, torch.device("cpu")), persistent=False)

    def forward(self, embedded: Tensor, streams: Tensor, passes: int) -> list[Tensor]:
        """Logits [B, L - passes + 1, draft vocabulary] of every pass. `embedded`: [B, L + 1, hidden], of all tokens of
        the texts; `streams`: [B, L, taps * hidden], what the model's layers have at all but the last."""
        length = streams.shape[1] - passes + 1
        features = self.fc(streams)[:, :length]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        found = []
        for step in range(passes):
            features = self._layer(embedded[:, 1 + step : 1 + step + length], features, step, keys, values)
            found.append(self.lm_head(self.norm(features)))
        return found

    def _layer(self, embedded: Tensor, features: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        layer: Any = self.layers[0]
        attention, mlp = layer["self_attn"], layer["mlp"]
        x = torch.cat((layer["input_layernorm"](embedded), layer["hidden_norm"](features)), dim=-1)
        q = self._rotated(attention["q_proj"](x), self.heads, step)
        keys.append(self._rotated(attention["k_proj"](x), self.kv_heads, step).repeat_interleave(self._group, 1))
        values.append(self._split(attention["v_proj"](x), self.kv_heads).repeat_interleave(self._group, 1))
        length, scale = x.shape[1], self.dim**-0.5
        scores = (q @ keys[0].transpose(2, 3)).float() * scale
        hidden_from = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(hidden_from, float("-inf"))
        own = [(q * key).sum(-1, keepdim=True).float() * scale for key in keys[1:]]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1).to(q.dtype)
        mixed = weights[..., :length] @ values[0]
        for index, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + index, None] * value
        stream = features + attention["o_proj"](mixed.transpose(1, 2).flatten(2))
        x = layer["post_attention_layernorm"](stream)
        out: Tensor = stream + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
        return out

    @property
    def _group(self) -> int:
        return self.heads // self.kv_heads

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.dim).transpose(1, 2)

    def _rotated(self, x: Tensor, heads: int, step: int) -> Tensor:
        x = self._split(x, heads)
        table: Tensor = self.rope[step : step + x.shape[2]]
        half = table.shape[1] // 2
        cos, sin = table[:, :half].to(x.dtype), table[:, half:].to(x.dtype)
        a, b = x[..., :half], x[..., half : 2 * half]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1)
