"""Adapters of virtual tokens as PEFT saves them, by their rows of embeddings or by their keys and values, and what the
library computes behind these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from tests.engine.tiny import Reference

TOKENS = {"tuned": 5, "encoded": 21, "cpt": 3}
"""Virtual tokens of each adapter: less than a block, more, and one of another kind."""
KEYS = {"prefix": 7, "cartridge": 19}
"""Tokens of each adapter: less than a block of the tests, and more."""
TYPES = {
    "tuned": "PROMPT_TUNING", "encoded": "P_TUNING", "cpt": "CPT", "prefix": "PREFIX_TUNING", "cartridge": "CARTRIDGE",
}  # fmt: skip


def write_prompt(folder: Path, base: Path, name: str, *, seed: int = 0, spread: float = 1.0, **config: Any) -> Path:
    """A random adapter of virtual tokens for the checkpoint in `base`, as PEFT saves one."""
    folder.mkdir(parents=True, exist_ok=True)
    embedding = load_file(base / "model.safetensors")["model.embed_tokens.weight"]
    count, hidden = TOKENS[name], embedding.shape[1]
    noise = torch.randn(count, hidden, generator=torch.Generator().manual_seed(seed))
    save_file({"prompt_embeddings": noise * embedding.std() * spread}, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": TYPES[name], "task_type": "CAUSAL_LM", "num_virtual_tokens": count, "token_dim": hidden,
        "num_transformer_submodules": 1, "num_attention_heads": 4, "num_layers": 2, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


class Prefixed(Reference):
    """What the library computes behind rows that it is given."""

    def __init__(self, base: Path, adapter: Path) -> None:
        super().__init__(base)
        self.rows = load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"]

    def _logits(self, tokens: list[int]) -> torch.Tensor:
        embedded = self.model.get_input_embeddings()(torch.tensor([tokens]))
        logits: torch.Tensor = self.model(inputs_embeds=torch.cat((self.rows[None], embedded), dim=1)).logits
        return logits[0, len(self.rows) :]

    @torch.inference_mode()
    def margins(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        logits = self._logits(prompt + output[:-1])[len(prompt) - 1 :]
        return logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        return self._logits(tokens).float().log_softmax(-1)


def write_prefix(folder: Path, base: Path, name: str, *, seed: int = 0, **config: Any) -> Path:
    """A random adapter of keys and values for the checkpoint in `base`, as PEFT saves one."""
    folder.mkdir(parents=True, exist_ok=True)
    model = json.loads((base / "config.json").read_text())
    heads, layers = model["num_key_value_heads"], model["num_hidden_layers"]
    size = heads * (model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"])
    noise = torch.randn(KEYS[name], layers * 2 * size, generator=torch.Generator().manual_seed(seed))
    save_file({"prompt_embeddings": noise}, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": TYPES[name], "task_type": "CAUSAL_LM", "num_virtual_tokens": KEYS[name], "token_dim": size,
        "num_transformer_submodules": 1, "num_attention_heads": heads, "num_layers": layers, "inference_mode": True,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


class WithCache(Reference):
    """What the library computes behind keys and values that it is given."""

    def __init__(self, base: Path, adapter: Path) -> None:
        super().__init__(base)
        config = json.loads((adapter / "adapter_config.json").read_text())
        stored = load_file(adapter / "adapter_model.safetensors")["prompt_embeddings"]
        heads, layers = config["num_attention_heads"], config["num_layers"]
        self.stored = stored.view(len(stored), layers, 2, heads, -1).permute(1, 2, 3, 0, 4)

    @torch.inference_mode()
    def margins(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        cache = DynamicCache(config=self.model.config)
        for layer, (keys, values) in enumerate(self.stored):
            cache.update(keys[None], values[None], layer)
        tokens = torch.tensor([prompt + output[:-1]])
        logits = self.model(tokens, past_key_values=cache).logits[0, len(prompt) - 1 :]
        return logits.amax(-1) - logits.gather(1, torch.tensor(output).unsqueeze(1)).squeeze(1)
