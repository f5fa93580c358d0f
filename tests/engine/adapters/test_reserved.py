"""What slots have room for follows from the listed adapters: tables of vectors and norms, and memory for blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from penstock.engine.adapters.folder import changes_outputs, input_blocks, replaced_rows, stored_keys, virtual_tokens
from penstock.engine.adapters.inputs import InputBlocks
from penstock.engine.adapters.layout import uncut
from penstock.engine.adapters.model_sites import layout_of
from penstock.engine.adapters.peft import read_adapter
from penstock.engine.adapters.prefixes import read_prefix
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.backends.backend import Backend
from penstock.engine.config import EngineConfig
from penstock.engine.models.families import read_config
from penstock.engine.parallel.adapters import adapter_cut
from penstock.engine.parallel.layout import Place
from penstock.engine.startup.adapters import beside_slots, with_vectors
from penstock.engine.startup.memory import size_cache
from penstock.errors import ConfigError
from penstock.sources.adapters import needs_of_listed
from tests.engine.adapters.files import write_adapter
from tests.engine.adapters.kind_files import write_kind
from tests.engine.adapters.virtual_files import write_prefix
from tests.engine.harness import make_engine
from tests.engine.tiny import write_checkpoint

DEVICE = cast(Backend, SimpleNamespace(in_host_memory=False, device=torch.device("cpu")))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("llama-gqa", tmp_path_factory.mktemp("reserved") / "base")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, False),
        ({"bias": "none", "modules_to_save": ["embed_tokens", "lm_head"]}, False),
        ({"use_dora": True}, True),
        ({"bias": "lora_only"}, True),
        ({"lora_bias": True}, True),
        ({"modules_to_save": ["model.norm"]}, True),
        ({"peft_type": "IA3"}, True),
        ({"peft_type": "LN_TUNING"}, True),
        ({"peft_type": "OFT"}, False),
        ({"peft_type": "VERA", "bias": "vera_only"}, True),
    ],
)
def test_tables_are_reserved_if_a_listed_adapter_needs_them(
    tmp_path: Path, config: dict[str, Any], expected: bool
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    listed = EngineConfig(
        model="m", adapters=(AdapterSpec("a", str(tmp_path / "none")), AdapterSpec("b", str(tmp_path)))
    )
    assert changes_outputs(tmp_path) is with_vectors(listed) is expected
    assert needs_of_listed(listed.adapters).vectors is expected
    assert with_vectors(replace(listed, adapter_vectors=True)) is True
    assert with_vectors(replace(listed, adapter_vectors=False)) is False


def test_a_configuration_that_cannot_be_read_needs_nothing(tmp_path: Path) -> None:
    for text in ("[", "3", '{"modules_to_save": 7}', '{"modules_to_save": [3]}'):
        (tmp_path / "adapter_config.json").write_text(text)
        assert changes_outputs(tmp_path) is False and input_blocks(tmp_path) == {}


def stored_bytes(blocks: InputBlocks | None) -> int:
    assert blocks is not None
    tensors = {id(part): part for parts in blocks.of.values() for part in parts if part is not None}
    return sum(4 * part.numel() for part in tensors.values())


@pytest.mark.parametrize("name", ["oft", "oft-exact", "oft-bound", "boft", "boft-butterfly"])
def test_room_for_blocks_is_what_an_adapter_takes(base: Path, tmp_path: Path, name: str) -> None:
    folder = write_kind(tmp_path / name, base, name)
    layout = layout_of(read_config(json.loads((base / "config.json").read_text())))
    loaded = read_adapter("a", folder, layout, max_rank=16, dtype=torch.float32, pin=False)
    config = EngineConfig(model="m", adapters=(AdapterSpec("a", str(folder)),))
    assert beside_slots(config, DEVICE, uncut(layout), torch.float16) == stored_bytes(loaded.inputs) > 0


@pytest.mark.parametrize("name", ["oft-small", "boft-small"])
def test_room_for_blocks_of_experts_and_latents_is_what_they_take(tmp_path: Path, name: str) -> None:
    """Those of `kv_b_proj` turn queries before they meet latents, and what heads have seen of these: they are there
    twice. Beside them there may be vectors of any expert and head."""
    base = write_checkpoint("deepseek-v3", tmp_path / "base")
    folder = write_kind(tmp_path / name, base, name, targets=("up_proj", "kv_b_proj"))
    layout = layout_of(read_config(json.loads((base / "config.json").read_text())))
    loaded = read_adapter("a", folder, layout, max_rank=16, dtype=torch.float32, pin=False)
    assert loaded.visits is not None
    changes = [change for _, change in sorted(loaded.visits.of.items())]
    taken = stored_bytes(loaded.inputs)
    taken += sum(4 * one.numel() for change in changes for part in change.blocks for one in part.values())
    taken += sum(4 * one.numel() for change in changes for one in (change.scale, change.shift) if one is not None)
    found = beside_slots(
        EngineConfig(model="m", adapters=(AdapterSpec("a", str(folder)),)), DEVICE, uncut(layout), torch.float16
    )
    assert found == taken if name == "oft-small" else found >= taken


def test_room_is_for_the_largest_that_are_in_slots_together(base: Path, tmp_path: Path) -> None:
    names = ("oft", "oft-bound", "oft-exact")
    folders = [write_kind(tmp_path / name, base, name) for name in names]
    folders.append(write_adapter(tmp_path / "lora", base))
    cut = uncut(layout_of(read_config(json.loads((base / "config.json").read_text()))))
    each = [
        beside_slots(EngineConfig(model="m", adapters=(AdapterSpec("a", str(one)),)), DEVICE, cut, torch.float16)
        for one in folders
    ]
    assert each[3] == 0 and len(set(each)) == 4
    specs = tuple(AdapterSpec(str(number), str(folder)) for number, folder in enumerate(folders))
    listed = EngineConfig(model="m", adapters=specs, adapter_slots=2)
    assert beside_slots(listed, DEVICE, cut, torch.float16) == sum(sorted(each)[-2:])
    assert beside_slots(replace(listed, adapter_memory=123), DEVICE, cut, torch.float16) == 123
    assert beside_slots(listed, cast(Backend, SimpleNamespace(in_host_memory=True)), cut, torch.float16) == 0


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_room_for_a_prefix_is_what_it_takes(base: Path, tmp_path: Path, rank: int) -> None:
    """Each of four ranks keeps one of the two heads of its two layers."""
    folder = write_prefix(tmp_path / "prefix", base, "cartridge")
    model = read_config(json.loads((base / "config.json").read_text()))
    cut = adapter_cut(model, Place(rank, 2, 2))
    kept = read_prefix(load_file(folder / "adapter_model.safetensors")["prompt_embeddings"], cut, torch.float16)
    config = EngineConfig(model="m", adapters=(AdapterSpec("a", str(folder)),))
    assert beside_slots(config, DEVICE, cut, torch.float16) == kept.data.nbytes > 0


def test_no_count_of_virtual_tokens_takes_all_memory(tmp_path: Path) -> None:
    for count, expected in ((10**15, 65536), (-3, 0), (True, 1), ("many", 0), (None, 0), (40, 40)):
        text = json.dumps({"peft_type": "CARTRIDGE", "num_virtual_tokens": count})
        (tmp_path / "adapter_config.json").write_text(text)
        assert virtual_tokens(tmp_path) == stored_keys(tmp_path) == replaced_rows(tmp_path) == expected


def test_the_cache_leaves_that_room(base: Path) -> None:
    engine = make_engine(base)
    backend, decoder = engine.runner.backend, engine.runner.decoder
    free = SimpleNamespace(available=lambda: 1 << 26, share_of_free=1.0, shared_by_ranks=False, peak=lambda step: 0)
    stand_in = cast(
        Backend,
        SimpleNamespace(memory=free, device=backend.device, long_context_bytes=lambda decoder, kv: 0),
    )
    config = replace(engine.config, num_blocks=None, kv_memory=None)
    sizes: dict[str, Any] = {"max_running": 4096, "max_model_len": 256, "budget": 64}
    full = size_cache(config, stand_in, decoder, torch.float32, **sizes)
    less = size_cache(config, stand_in, decoder, torch.float32, apart=1 << 25, **sizes)
    assert less.blocks == pytest.approx(full.blocks / 2, abs=1)
    with pytest.raises(ConfigError, match=r"0 KiB are allowed beside 1\.00 GiB .*lower adapter_memory"):
        size_cache(config, stand_in, decoder, torch.float32, apart=1 << 30, **sizes)


def test_the_cache_leaves_room_for_captured_steps(base: Path) -> None:
    """A share of what is free is little where weights have taken the most."""
    engine = make_engine(base)
    backend, decoder = engine.runner.backend, engine.runner.decoder
    free = SimpleNamespace(available=lambda: 1 << 26, share_of_free=0.92, shared_by_ranks=False, peak=lambda step: 0)
    free.total, free.used, free.share_of_rest = (lambda: 1 << 28), (lambda: 1 << 27), 0.92
    stand_in = cast(
        Backend,
        SimpleNamespace(memory=free, device=backend.device, long_context_bytes=lambda decoder, kv: 0),
    )
    config = replace(engine.config, num_blocks=None, kv_memory=None)
    sizes: dict[str, Any] = {"max_running": 4096, "max_model_len": 256, "budget": 64}
    for share, room in ((None, 1 << 26), (0.75, 1 << 26), (0.625, 1 << 25)):
        shared = replace(config, memory_share=share)
        blocks = [
            size_cache(shared, stand_in, decoder, torch.float32, graphs=graphs, **sizes).blocks
            for graphs in (0, room // 100, room // 5, room)
        ]
        whole = blocks[0] / 0.92
        assert blocks == pytest.approx([0.92 * whole, 0.92 * whole, 0.8 * whole, 0.75 * whole], rel=0.01)
