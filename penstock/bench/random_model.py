"""A model folder with random weights, for servers: what `RandomCheckpoint` has in memory, as files with a tokenizer.

The tokenizer has the vocabulary's size and says something for every token; nothing it says means anything.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from penstock.bench import shapes
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.machine import usable_cores

_SHARD_BYTES = 4 << 30
_WRITERS = 8
"""Tensors that are made and written at a time."""


def write(folder: Path, shape: str, progress: Callable[[int, int], None] | None = None) -> None:
    """Write the shape's checkpoint in bfloat16; `progress` gets the bytes written and their total."""
    config = shapes.named(shape)
    checkpoint = RandomCheckpoint(config, dtype=torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {name: torch.bfloat16.itemsize * math.prod(checkpoint.shapes[name]) for name in sorted(checkpoint.names())}
    total, written = sum(sizes.values()), 0
    index: dict[str, str] = {}
    checkpoint.tensor(next(iter(sizes)))  # the numbers that all others are made of, before there are threads
    threads = min(_WRITERS, usable_cores())
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for number, names in enumerate(_shards(sizes), start=1):
            file = f"model-{number:05}.safetensors"
            for size in _write_shard(folder / file, {name: sizes[name] for name in names}, checkpoint, pool):
                written += size
                if progress is not None:
                    progress(written, total)
            index |= dict.fromkeys(names, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index})
    _write_json(folder / "config.json", config | {"torch_dtype": "bfloat16"})
    _write_tokenizer(folder, int(config["vocab_size"]))


def _shards(sizes: dict[str, int]) -> Iterator[list[str]]:
    names: list[str] = []
    held = 0
    for name, size in sizes.items():
        names.append(name)
        held += size
        if held >= _SHARD_BYTES:
            yield names
            names, held = [], 0
    if names:
        yield names


def _write_shard(path: Path, sizes: dict[str, int], checkpoint: RandomCheckpoint, pool: Executor) -> Iterator[int]:
    """One safetensors file; its tensors are made and written side by side. Yields the bytes of each that is done."""
    ends = list(itertools.accumulate(sizes.values()))
    entries: dict[str, Any] = {
        name: {"dtype": "BF16", "shape": checkpoint.shapes[name], "data_offsets": [end - size, end]}
        for (name, size), end in zip(sizes.items(), ends, strict=True)
    }
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.flush()

        def make(name: str) -> int:
            tensor = checkpoint.tensor(name).contiguous()
            data = tensor.view(-1).view(torch.uint8).numpy().data
            if len(data) != sizes[name]:
                raise AssertionError(f"{name} has {len(data)} bytes, not {sizes[name]}")
            place, done = 8 + len(header) + entries[name]["data_offsets"][0], 0
            while done < len(data):
                done += os.pwrite(file.fileno(), data[done:], place + done)
            return done

        yield from pool.map(make, sizes)


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
