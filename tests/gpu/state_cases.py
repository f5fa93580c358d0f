"""Steps of sequences that have states, and engines with recurrent layers against engines on the CPU."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import torch
from gpu_harness import integers
from graph_watch import watched_prompts
from torch import Tensor

from penstock.engine.backends.interface import AttentionBatch, StateBatch
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from tests.engine.harness import generate, greedy


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What a step computes of one sequence: its first position, tokens, the slots it reads and writes."""

    start: int
    length: int
    read: int
    writes: tuple[int, ...]
    decodes: bool


DECODES = [Run(5, 1, 1, (1,), True), Run(0, 1, 0, (2,), True), Run(2, 1, 3, (4,), True)]
VERIFIED = [Run(7, 4, 5, (5, 6, 7, 8), True)]
PROMPTS = [Run(0, 75, 0, (2,), False), Run(33, 2, 3, (3,), False), Run(1, 130, 4, (9,), False)]


def batch_of(runs: list[Run]) -> AttentionBatch:
    """Decodes come first, and draft tokens count as decodes. No run may write what another one reads or writes: nobody
    knows which of them is first."""
    for run in runs:
        others = {slot for other in runs if other is not run for slot in (other.read, *other.writes)}
        assert others.isdisjoint({*run.writes} - {0}), f"{run} writes a slot of another run"
    positions, first, last, reads, writes, starts = [], [], [], [], [], [0]
    for run in runs:
        begin = len(positions)
        positions += range(run.start, run.start + run.length)
        first += [begin] * run.length
        last += [begin + run.length - 1] * run.length
        reads += [run.read] * run.length
        writes += [0] * (run.length - len(run.writes)) + list(run.writes)
        starts += range(begin + 1, begin + run.length + 1) if run.decodes else [begin + run.length]
    contexts = [positions[end - 1] + 1 for end in starts[1:]]
    return AttentionBatch(
        positions=integers(positions, torch.int64),
        slots=integers(positions, torch.int64),
        query_starts=integers(starts, torch.int32),
        context_lens=integers(contexts, torch.int32),
        rows=integers([0] * len(contexts), torch.int32),
        block_tables=integers([0], torch.int32).view(1, 1),
        num_decodes=sum(run.length for run in runs if run.decodes),
        max_query=max(run.length for run in runs),
        max_context=max(contexts),
        states=StateBatch(*(integers(values, torch.int32) for values in (first, last, reads, writes))),
    )


def moved(x: Tensor, device: torch.device | str) -> Tensor:
    return x.detach().clone().to(device)


def batch_on(batch: AttentionBatch, device: torch.device | str) -> AttentionBatch:
    """What layers with states read of it, elsewhere."""
    states = batch.states
    assert states is not None
    parts = (moved(getattr(states, name), device) for name in ("first", "last", "reads", "writes"))
    return dataclasses.replace(batch, positions=moved(batch.positions, device), states=StateBatch(*parts))


class SameEverywhere(RandomCheckpoint):
    """Devices draw other numbers from the same seed: all get the CPU's."""

    def tensor(self, name: str, device: str | torch.device | None = None) -> Tensor:
        return super().tensor(name, "cpu").to(device or "cpu")


ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small chunks and preemption": {"token_budget": 48, "num_blocks": 24, "max_running": 6},
    "drafts": {"speculation": "ngram"},
    "deterministic": {"deterministic": True},
}


def engines_equal_the_cpu(config: dict[str, Any], embedding_scale: float = 1.0, *, captures: bool = True) -> None:
    """Prefix hits, preemption and rejected draft tokens, with CUDA graphs, against an engine on the CPU without any.
    `captures`: whether steps of the model are captured."""
    weights = SameEverywhere(config, seed=3, dtype=torch.float32, embedding_scale=embedding_scale)

    def engine(device: str, **settings: Any) -> Engine:
        settings = {"dtype": "float32", "state_interval": 32, "max_running": 8, **settings}
        return Engine.load(EngineConfig(model="states", device=device, **settings), checkpoint=weights)

    chance = random.Random(5)
    prompts = {f"r{n}": [chance.randrange(199) for _ in range(n)] for n in (1, 17, 64, 130, 300)}
    text = prompts["r64"]
    prompts["repeated"] = text + text + text[:20]
    alone = engine("cpu", prefix_cache=False)
    expected = {name: generate(alone, greedy(name, prompt, 40))[name] for name, prompt in prompts.items()}
    assert all(len(set(tokens)) > 10 for tokens in expected.values()), "texts that repeat one token prove little"
    for label, settings in ENGINES.items():
        here = engine("cuda", **settings)
        with watched_prompts() as shapes:
            for turn in range(2):
                got = generate(here, *(greedy(f"{name}-{turn}", prompt, 40) for name, prompt in prompts.items()))
                for name, tokens in expected.items():
                    assert got[f"{name}-{turn}"] == tokens, (label, name)
            for name, prompt in prompts.items():
                got = generate(here, greedy(f"{name} alone", prompt, 40))
                assert got[f"{name} alone"] == expected[name], (label, name)
        kinds = {bool(shape.decodes) for shape in shapes}
        captured = captures and "deterministic" not in settings
        assert kinds == ({False, True} if captured else set()), (label, shapes)
        assert here.load_snapshot().prefix_hit_tokens > 0, label
        here.check_idle()
        here.close()
