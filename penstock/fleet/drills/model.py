"""The model of a throw-away fleet: random weights, one token per byte. It says nothing, quickly, and after every token
something else; the same request always gets the same answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONTEXT = 4096
_SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_model(folder: Path) -> None:
    """A checkpoint with its tokenizer, as engines and gateways read it."""
    import torch
    from safetensors.torch import save_file

    from penstock.engine.loading.random_checkpoint import RandomCheckpoint
    from penstock.text.byte_tokenizer import write_tokenizer

    folder.mkdir(parents=True)
    tokenizer = write_tokenizer(folder, context_length=CONTEXT)
    written = json.loads((folder / "config.json").read_text())
    config = {**_SHAPE, **written, "vocab_size": tokenizer.get_vocab_size()}
    source = RandomCheckpoint(config, dtype=torch.float32, embedding_scale=1.0)
    save_file({name: source.tensor(name).contiguous() for name in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
