"""`penstock bench pipeline`: how full a pipeline is, on CPU ranks of one thread each.

Three engines in one run, in turns: one stage alone (its layers in one process, as many sequences as one step of the
pipeline has), the pipeline, and the whole model in one process. In a full pipeline all stages work all the time, so
tokens come out as fast as from one stage alone, though each passes through all of them: that share is the figure.
Against the whole model on one core the pipeline is as many times faster as it has stages, at best.

What is lost goes to the head and sampling, which only the first stage has, to copies between processes and to the
machine: stages share its memory bus and caches, and where they have no core of their own the figures say nothing.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.bench.engine import BenchError
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.loading.random_checkpoint import RandomCheckpoint
from penstock.engine.request import Request, SamplingParams
from penstock.machine import usable_cores

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("workload", "one stage tok/s", "pipeline tok/s", "full", "whole model tok/s", "times stages", "ranks busy")
VOCABULARY = 512
"""Small, since the head is in the first stage alone."""
CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """`batch`: sequences in a step."""

    name: str
    batch: int
    input_len: int
    output_len: int

    def tokens(self, batches: int) -> int:
        """What is counted: generated tokens, or those of the prompts where only one is generated."""
        return batches * self.batch * (self.output_len if self.output_len > 1 else self.input_len)


@dataclass(frozen=True, slots=True)
class PipelineBenchSettings:
    stages: int = 2
    layers: int = 4
    """Of each stage."""
    hidden: int = 768
    batch: int = 16
    output_len: int = 48
    input_len: int = 512
    rounds: int = 3

    @property
    def cases(self) -> tuple[Case, ...]:
        return (
            Case(f"decode, {self.batch} a step", self.batch, 32, self.output_len),
            Case(f"prompts of {self.input_len}", 10, self.input_len, 1),
            Case(f"one prompt of {4 * self.input_len}", 1, 4 * self.input_len, 1),
        )


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of a case."""

    tps: float
    busy: list[float]
    """Processor time by the clock, of each rank."""


def main(settings: PipelineBenchSettings, json_file: Path | None, console: Console) -> None:
    from penstock.bench import report

    cores = usable_cores()
    console.print(f"{settings.stages} stages of {settings.layers} layers, one thread each: {report.machine_line()}")
    if cores < settings.stages:
        console.print(f"[yellow]there are {cores} cores for {settings.stages} stages: they take turns[/yellow]")
    table = report.table(f"Median of {settings.rounds} turns each", *COLUMNS)
    results = []
    with ExitStack() as stack:
        with console.status("loading"):
            engines = {
                "stage": stack.enter_context(_engine(settings, settings.layers, 1)),
                "pipeline": stack.enter_context(_engine(settings, settings.layers * settings.stages, settings.stages)),
                "whole": stack.enter_context(_engine(settings, settings.layers * settings.stages, 1)),
            }
        for case in settings.cases:
            with console.status(case.name):
                medians, busy = _measure(engines, case, settings)
            full = medians["pipeline"] / medians["stage"]
            against_one = medians["pipeline"] / medians["whole"] / settings.stages
            results.append({"workload": case.name, **medians, "full": full, "of_stages": against_one, "busy": busy})
            table.add_row(
                case.name,
                report.number(medians["stage"]),
                report.number(medians["pipeline"]),
                f"{full:.2f}",
                report.number(medians["whole"]),
                f"{against_one:.2f}",
                ", ".join(f"{share:.0%}" for share in busy),
            )
    console.print(table)
    if json_file is not None:
        report.write_json(json_file, "pipeline", asdict(settings), results)


@contextmanager
def _engine(settings: PipelineBenchSettings, layers: int, stages: int) -> Iterator[Engine]:
    engine = Engine.load(
        EngineConfig(
            model="random",
            name=f"random, {layers} layers",
            device="cpu",
            dtype="float32",
            weights="dense",
            threads=1,
            max_running=settings.stages * settings.batch,
            max_model_len=CONTEXT,
            kv_memory=256 << 20,
            prefix_cache=False,
            pipeline_parallel=stages,
        ),
        checkpoint=RandomCheckpoint(_shape(settings.hidden, layers)),
    )
    try:
        yield engine
    finally:
        engine.close()


def _shape(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3 // 64 * 64,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "head_dim": 64,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
    }


def _measure(
    engines: dict[str, Engine], case: Case, settings: PipelineBenchSettings
) -> tuple[dict[str, float], list[float]]:
    """Median tokens per second of each engine, and how busy the pipeline's ranks were."""
    turns: dict[str, list[Turn]] = {name: [] for name in engines}
    for number in range(settings.rounds + 1):  # the first warms up
        for name, engine in engines.items():
            turn = run(engine, case, settings.stages if name == "pipeline" and case.batch > 1 else 1, str(number))
            if number:
                turns[name].append(turn)
    medians = {name: statistics.median(turn.tps for turn in some) for name, some in turns.items()}
    busy = zip(*(turn.busy for turn in turns["pipeline"]), strict=True)
    return medians, [statistics.median(shares) for shares in busy]


def run(engine: Engine, case: Case, batches: int, tag: str) -> Turn:
    """`batches` steps' worth of sequences, all at once."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=case.output_len, temperature=0.0)
    for index in range(batches * case.batch):
        prompt = [rng.randrange(VOCABULARY) for _ in range(case.input_len)]
        engine.submit(Request(f"{tag}/{index}", prompt, params))
    produced, counted_from = 0, 0
    begin = time.perf_counter()
    cpu = _cpu_seconds(engine)
    prompts = batches * case.batch
    while engine.has_work:
        output = engine.step()
        for delta in output.deltas if output is not None else ():
            if delta.finish_reason == "error":
                raise BenchError(f"request {delta.request_id} failed: {delta.error}")
            produced += len(delta.tokens)
            prompts -= delta.queue_s is not None and bool(delta.tokens)
        if case.output_len > 1 and not counted_from and not prompts:
            # All prompts are computed: from here on only decode steps count.
            begin, counted_from, cpu = time.perf_counter(), produced, _cpu_seconds(engine)
    seconds = time.perf_counter() - begin
    used = [(after - before) / seconds for before, after in zip(cpu, _cpu_seconds(engine), strict=True)]
    expected = batches * case.batch * case.output_len
    if produced != expected:
        raise BenchError(f"{produced} tokens came out instead of {expected}")
    tokens = produced - counted_from if case.output_len > 1 else case.tokens(batches)
    return Turn(tokens / seconds, used)


def _cpu_seconds(engine: Engine) -> list[float]:
    """Processor time of every rank so far; only rank 0's where the system does not say."""
    return [time.process_time(), *_of_processes([] if engine.ranks is None else engine.ranks.pids)]


def _of_processes(pids: Sequence[int]) -> list[float]:
    found = []
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []
        found.append((int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))
    return found
