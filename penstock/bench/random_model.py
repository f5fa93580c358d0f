"""A model folder with random weights, for servers: what `RandomCheckpoint` has in memory, as files with a tokenizer.

The tokenizer has the vocabulary's size and says something for every token; nothing it says means anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.bench import shapes
from penstock.engine.loading.random_checkpoint import RandomCheckpoint

_SHARD_BYTES = 4 << 30


def write(folder: Path, shape: str, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the shape's checkpoint in bfloat16; `progress` gets the bytes written and their total."""
    from safetensors.torch import save_file

    config = shapes.named(shape)
    checkpoint = RandomCheckpoint(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(torch.Size(size).numel() for size in checkpoint.shapes.values()) * torch.bfloat16.itemsize
    written = held = shards = 0
    index: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    names = sorted(checkpoint.names())
    for name in names:
        shard[name] = checkpoint.tensor(name).contiguous()
        held += shard[name].nbytes
        if held < _SHARD_BYTES and name != names[-1]:
            continue
        shards += 1
        file = f"model-{shards:05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
        written, held = written + held, 0
        shard.clear()
        if progress is not None:
            progress(written, total)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(folder / "config.json", config | {"torch_dtype": "bfloat16"})
    _write_tokenizer(folder, int(config["vocab_size"]))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    end = "<|end|>"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    vocabulary |= {f"w{index}": index for index in range(len(letters), vocab_size - 1)}
    vocabulary[end] = vocab_size - 1
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", {"eos_token": end})
