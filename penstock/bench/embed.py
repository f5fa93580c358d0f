"""`penstock bench embed`: an encoder engine and `transformers` alternate on the same texts with the same weights.

transformers is used as its users do: texts sorted by length, padded batches, mean pooling. Both run in float32, and
their vectors must agree before anything is measured.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from penstock.bench import report
from penstock.bench.compare import peer_library, verdict
from penstock.bench.engine import BenchError
from penstock.engine.encoder.config import EncoderEngineConfig
from penstock.engine.encoder.core import EncoderEngine
from penstock.engine.encoder.request import EncodeRequest
from penstock.sources.resolve import resolve

AGREEMENT = 1e-4


@dataclass(frozen=True, slots=True)
class EmbedBenchSettings:
    model: str = "minilm"
    texts: int = 256
    batch: int = 32
    rounds: int = 3
    device: str = "auto"
    threads: int | None = None


def lengths(count: int, longest: int) -> list[int]:
    """Like passages and questions together: a median of some 40 tokens, a long tail."""
    draw = random.Random(0)
    return [max(4, min(longest, round(draw.lognormvariate(3.7, 0.8)))) for _ in range(count)]


def make_texts(count: int, vocab_size: int, longest: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths(count, longest)]


def encode(engine: EncoderEngine, texts: list[list[int]]) -> Tensor:
    engine.encode(EncodeRequest("bench", texts))
    while engine.has_work:
        output = engine.step()
        if output is not None and output.encodings:
            return torch.frombuffer(bytearray(output.encodings[0].numbers), dtype=torch.float32).view(len(texts), -1)
    raise BenchError("the encoder gave no answer")


class Peer:
    """transformers, as sentence-embedding code uses it."""

    def __init__(self, path: Path, device: torch.device) -> None:
        transformers = peer_library()
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self.device = device
        self.model: Any = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval().to(device)

    @torch.inference_mode()
    def encode(self, texts: list[list[int]], batch: int) -> Tensor:
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        found: list[Tensor] = [torch.empty(0)] * len(texts)
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            width = len(texts[chosen[-1]])
            ids = torch.tensor([texts[index] + [0] * (width - len(texts[index])) for index in chosen])
            mask = torch.tensor([[1] * len(texts[i]) + [0] * (width - len(texts[i])) for i in chosen])
            ids, mask = ids.to(self.device), mask.to(self.device)
            states = self.model(ids, attention_mask=mask).last_hidden_state
            pooled = (states * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
            for index, vector in zip(chosen, F.normalize(pooled, dim=-1).cpu(), strict=True):
                found[index] = vector
        return torch.stack(found)


def main(settings: EmbedBenchSettings, json_file: Path | None, console: Console) -> None:
    path = resolve(settings.model)
    engine = EncoderEngine.load(
        EncoderEngineConfig(str(path), name=settings.model, device=settings.device, threads=settings.threads)
    )
    info = engine.info
    texts = make_texts(settings.texts, info.vocab_size, info.max_model_len)
    tokens = sum(map(len, texts))
    peer = Peer(path, torch.device(info.device))
    few = texts[: settings.batch]
    apart = (encode(engine, few) - peer.encode(few, settings.batch)).abs().max().item()
    if not apart < AGREEMENT:
        raise BenchError(f"the two do not agree: their vectors are up to {apart:.1e} apart")
    ours: list[float] = []
    theirs: list[float] = []
    with console.status("") as status:
        for attempt in range(settings.rounds):
            status.update(f"round {attempt + 1} of {settings.rounds}")
            begin = time.perf_counter()
            encode(engine, texts)
            middle = time.perf_counter()
            peer.encode(texts, settings.batch)
            ours.append(len(texts) / (middle - begin))
            theirs.append(len(texts) / (time.perf_counter() - middle))
    console.print(f"[bold]{settings.model}[/bold] on {info.device}: {report.machine_line()}")
    columns = ("texts/s", "median", *(f"round {attempt + 1}" for attempt in range(settings.rounds)), "tokens/s")
    rows = report.table(f"{len(texts)} texts of {tokens / len(texts):.0f} tokens on average, by turns", *columns)
    rate = tokens / len(texts)
    for label, values in (("Penstock", ours), (f"transformers, batches of {settings.batch}", theirs)):
        median = statistics.median(values)
        rows.add_row(label, *(report.number(value) for value in (median, *values)), report.number(median * rate, 0))
    console.print(rows)
    console.print(f"Vectors agree to {apart:.0e}.")
    ratio = statistics.median(ours) / statistics.median(theirs)
    console.print(verdict(ratio), style="bold")
    if json_file is not None:
        results = {"ours": ours, "transformers": theirs, "ratio": ratio, "apart": apart, "tokens": tokens}
        report.write_json(json_file, "embed", dataclasses.asdict(settings), results)
