"""Model files of any content end as a model or as one readable error: GGUF, safetensors, configurations, adapters,
tokenizers. Nothing crashes, hangs, or takes memory out of proportion to the file.

An input is a line that names its kind, and the content. GGUF files come as bytes, and as JSON that describes one: edits
of that reach past the header into what the values mean.
"""

from __future__ import annotations

import json
import random
import resource
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.engine.adapters.layout import AdapterLayout
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import read_adapter
from penstock.engine.loading.checkpoint import Checkpoint, open_checkpoint
from penstock.engine.loading.random_checkpoint import tensor_shapes
from penstock.engine.models.families import read_config
from penstock.errors import PenstockError
from penstock.text.loader import load_text
from tests.engine.harness import make_engine
from tests.fuzz import harness

HIDDEN, VOCABULARY = 32, 40
LARGEST_GROWTH = 400 << 10
"""Kilobytes that one input may add to the process: its files have one megabyte at most."""
ARCHITECTURES = ("llama", "mistral3", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "phi3")
HF_CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def described(arch: str, **more: Any) -> dict[str, Any]:
    """A GGUF file of one layer as JSON: its metadata, and the shapes of its tensors."""
    keys = {
        "block_count": 1, "context_length": 64, "embedding_length": HIDDEN, "feed_forward_length": 32,
        "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16, "rope.freq_base": 10000.0,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": 16, **more,
    }  # fmt: skip
    tokens = ["<unk>", "<s>", "</s>", *(chr(97 + i % 26) * (1 + i // 26) for i in range(VOCABULARY - 3))]
    matrices: dict[str, list[int]] = {
        "attn_q": [HIDDEN, 32], "attn_k": [HIDDEN, 16], "attn_v": [HIDDEN, 16], "attn_output": [32, HIDDEN],
        "ffn_gate": [HIDDEN, 32], "ffn_up": [HIDDEN, 32], "ffn_down": [32, HIDDEN],
    }  # fmt: skip
    norms = ["attn_norm", "ffn_norm"]
    if arch in ("gemma2", "gemma3"):
        norms += ["post_attention_norm", "post_ffw_norm"]
    tensors = {f"blk.0.{name}.weight": shape for name, shape in matrices.items()}
    tensors |= {f"blk.0.{name}.weight": [HIDDEN] for name in norms}
    if arch in ("qwen3", "gemma3", "qwen3moe"):
        tensors |= {f"blk.0.attn_{part}_norm.weight": [16] for part in "qk"}
    tensors |= {"token_embd.weight": [HIDDEN, VOCABULARY], "output_norm.weight": [HIDDEN]}
    tokenizer = {
        "model": "llama", "tokens": tokens, "scores": [-1.0 * i for i in range(VOCABULARY)], "bos_token_id": 1,
        "token_type": [2, 3, 3, *[1] * (VOCABULARY - 3)], "eos_token_id": 2, "unknown_token_id": 0,
    }  # fmt: skip
    if arch.startswith("qwen"):
        tokenizer |= {"model": "gpt2", "pre": "qwen2", "merges": ["a a", "b b"]}
    return {
        "metadata": {
            "general.architecture": arch,
            **{f"{arch}.{key}": value for key, value in keys.items()},
            **{f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()},
        },
        "tensors": tensors,
    }


def gguf_bytes(document: Any) -> bytes:
    """A GGUF file as its description has it, sensible or not."""
    document = document if isinstance(document, dict) else {}
    metadata, tensors = document.get("metadata"), document.get("tensors")
    metadata = metadata if isinstance(metadata, dict) else {}
    tensors = tensors if isinstance(tensors, dict) else {}
    head = b"".join(_string(key) + _value(value) for key, value in metadata.items())
    offset, body = 0, []
    for name, shape in tensors.items():
        sides = [abs(side) % (1 << 64) for side in shape if isinstance(side, int)] if isinstance(shape, list) else []
        head += _string(name) + struct.pack("<I", len(sides)) + b"".join(struct.pack("<Q", side) for side in sides)
        head += struct.pack("<IQ", 0, offset)
        count = 1
        for side in sides:
            count *= side
        if count < 1 << 17:
            offset += -(-4 * count // 32) * 32
            body.append(b"\x3d\x0a\x57\x3c" * (-(-count // 8) * 8))
    begin = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + head
    return begin + b"\0" * (-len(begin) % 32) + b"".join(body)


def _string(text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(encoded)) + encoded


def _value(value: Any) -> bytes:
    kind, packed = _packed(value)
    return struct.pack("<I", kind) + packed


def _packed(value: Any) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int() if 0 <= value < 1 << 32:
            return 4, struct.pack("<I", value)
        case int():
            return 11, struct.pack("<q", max(min(value, (1 << 63) - 1), -(1 << 63)))
        case float():
            return 12, struct.pack("<d", value)
        case str():
            return 8, _string(value)
        case list():
            items = [_packed(item) for item in value]
            first = items[0][0] if items else 4
            same = [packed for kind, packed in items if kind == first]
            return 9, struct.pack("<IQ", first, len(same)) + b"".join(same)
        case _:
            return 8, _string(json.dumps(value))


class Target:
    """Runs one input in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        model = read_config(HF_CONFIG)
        self.layout: AdapterLayout = layout_of(model)
        self.weights = {name: torch.randn(shape) for name, shape in tensor_shapes(HF_CONFIG).items()}
        self.lora = {
            f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight": torch.randn(shape)
            for side, shape in (("A", (4, HIDDEN)), ("B", (32, 4)))
        }
        self.checkpoint, self.adapter = folder / "checkpoint", folder / "adapter"
        for place, tensors in ((self.checkpoint, self.weights), (self.adapter, self.lora)):
            place.mkdir()
            save_file(tensors, place / f"{'adapter_' if place is self.adapter else ''}model.safetensors")
        self.stored = (self.checkpoint / "model.safetensors").read_bytes()

    def __call__(self, data: bytes) -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        kind, _, content = data.partition(b"\n")
        try:
            self.run(kind.decode("ascii", "replace"), content)
        except PenstockError as error:
            assert len(str(error)) < 2000, "an error that nobody reads"
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < LARGEST_GROWTH, f"took {grown >> 10} MB"

    def run(self, kind: str, content: bytes) -> None:
        if kind == "gguf-json":
            try:
                document = json.loads(content)
            except (ValueError, RecursionError):
                return
            content, kind = gguf_bytes(document), "gguf"
        if kind == "gguf":
            path = self.folder / "model.gguf"
            path.write_bytes(content)
            self.use(open_checkpoint(path))
            make_engine(path, max_model_len=32, num_blocks=8, threads=1)
            load_text(path)
        elif kind == "safetensors":
            (self.checkpoint / "config.json").write_text(json.dumps(HF_CONFIG))
            (self.checkpoint / "model.safetensors").write_bytes(content)
            self.use(open_checkpoint(self.checkpoint))
        elif kind == "config.json":
            (self.checkpoint / "config.json").write_bytes(content)
            (self.checkpoint / "model.safetensors").write_bytes(self.stored)
            self.use(open_checkpoint(self.checkpoint))
            make_engine(self.checkpoint, max_model_len=32, num_blocks=8, threads=1)
        elif kind == "adapter_config.json":
            (self.adapter / "adapter_config.json").write_bytes(content)
            read_adapter("a", self.adapter, self.layout, max_rank=16, dtype=torch.float32, pin=False)
        elif kind == "tokenizer.json":
            (self.checkpoint / "config.json").write_text(json.dumps(HF_CONFIG))
            (self.checkpoint / "tokenizer.json").write_bytes(content)
            load_text(self.checkpoint)

    @staticmethod
    def use(checkpoint: Checkpoint) -> None:
        for name in list(checkpoint.names())[:50]:
            checkpoint.tensor(name)


def seeds(target: Target) -> list[bytes]:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    documents = [described(arch) for arch in ARCHITECTURES] + [described("mistral3", **yarn)]
    found = [b"gguf-json\n" + json.dumps(document).encode() for document in documents]
    found += [b"gguf\n" + gguf_bytes(document) for document in documents[:3]]
    found.append(b"safetensors\n" + target.stored)
    quantization = {"quant_method": "fp8", "weight_block_size": [16, 16], "activation_scheme": "dynamic"}
    packed = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    }  # fmt: skip
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "dynamic": {"-:x": {}}}
    scaling = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
    for more in ({}, scaling, *({"quantization_config": each} for each in (quantization, packed, gptq))):
        found.append(b"config.json\n" + json.dumps({**HF_CONFIG, **more}).encode())
    lora = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "use_rslora": False,
            "rank_pattern": {}, "layers_to_transform": [0], "init_lora_weights": True}  # fmt: skip
    found.append(b"adapter_config.json\n" + json.dumps(lora).encode())
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None, "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]},
    }  # fmt: skip
    found.append(b"tokenizer.json\n" + json.dumps(tokenizer).encode())
    return found


def mutate(data: bytes, rng: random.Random, pool: Sequence[bytes]) -> bytes:
    kind, _, content = data.partition(b"\n")
    same = [other.partition(b"\n")[2] for other in pool if other.partition(b"\n")[0] == kind]
    if kind in (b"gguf", b"safetensors"):
        head = rng.choice((64, 2048, 8192))  # what it means is at the front
        return kind + b"\n" + harness.mutate_bytes(content[:head], rng, same) + content[head:]
    return kind + b"\n" + harness.mutate_json(content, rng, same)


@pytest.mark.parametrize("seconds", harness.DURATIONS)
def test_a_broken_model_file_is_one_readable_error(seconds: float, tmp_path: Path) -> None:
    target = Target(tmp_path)
    report = harness.fuzz("gguf", target, seeds(target), seconds=seconds, quick=400, limit_s=5.0, mutate=mutate)
    assert seconds == harness.QUICK_S or report.inputs > 40, "a busy machine may stop a quick run early"
