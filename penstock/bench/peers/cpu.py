"""`penstock bench cpu-peers`: Penstock and other engines on this CPU, with the same prompts and threads.

Nothing is installed: engines that are here take part. A peer may have an interpreter of its own, since their
dependencies rarely agree. Every engine is loaded once, in a process of its own, and they take turns (A B A B), so that
whatever else the machine does affects all of them. Medians are compared; a ratio between 0.8 and 1.25 says nothing.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report
from penstock.bench.gateway.harness import free_port
from penstock.engine.backends.cpu.build import isa_choices
from penstock.engine.loading.checkpoint import open_checkpoint
from penstock.errors import ConfigError
from penstock.sources.resolve import resolve

WORKER = Path(__file__).with_name("worker.py")
MODULES = {"llama.cpp": "xllamacpp", "vllm": "vllm", "openvino": "openvino_genai"}
"""What a peer's interpreter must be able to import."""


@dataclass(frozen=True, slots=True)
class PeerWorkload:
    """A closed loop of equal requests. `unit` says what its figure is."""

    requests: int
    at_once: int
    inputs: int
    outputs: int
    unit: str

    def figure(self, seconds: float, firsts: Sequence[float]) -> float:
        if self.unit == "ms to first token":
            return 1e3 * statistics.median(firsts)
        tokens = self.inputs if self.unit == "prompt tok/s" else self.outputs
        return self.requests * tokens / seconds


@dataclass(frozen=True, slots=True)
class CpuPeersBenchSettings:
    threads: int
    model: str = "smollm2-135m"
    """A GGUF model."""
    folder: str | None = None
    """The same model as safetensors, for peers that need it."""
    workloads: tuple[str, ...] = ()
    """All when empty."""
    rounds: int = 5
    requests_per_slot: int = 4
    """Length of the closed loops."""
    pythons: Mapping[str, str] = field(default_factory=dict)
    """Interpreters of peers."""
    peers: tuple[str, ...] = ()
    """Only these; all that are here when empty."""
    peer_models: Mapping[str, str] = field(default_factory=dict)
    """The same model in a peer's best form."""
    flash_attention: bool = False
    """llama.cpp with it (off is faster on most CPUs)."""
    isa: str | None = None
    """Penstock computes as on a CPU that has no more than this instruction set; peers use whatever they find."""
    verbose: bool = False


def workloads(per_slot: int) -> dict[str, PeerWorkload]:
    loops = {f"c{n}": PeerWorkload(per_slot * n, n, 128, 128, "output tok/s") for n in (1, 16, 64)}
    return loops | {
        "p512": PeerWorkload(8, 8, 512, 1, "prompt tok/s"),
        "ttft128": PeerWorkload(3, 1, 128, 1, "ms to first token"),
    }


@dataclass(slots=True)
class Peer:
    """An engine in its own process."""

    name: str
    command: list[str]
    ready_s: float = 0.0
    figures: dict[str, list[float]] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    def start(self, settings: dict[str, Any]) -> None:
        begin = time.perf_counter()
        log = subprocess.DEVNULL if settings["quiet"] else None
        self.process = subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        self.ask(settings)
        self.ready_s = time.perf_counter() - begin

    def ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}; --verbose shows what it said")
        return dict(json.loads(answer))

    def run(self, workload: PeerWorkload, vocabulary: int, seed: int) -> float:
        rng = random.Random(seed)
        prompts = [rng.choices(range(vocabulary), k=workload.inputs) for _ in range(workload.requests)]
        job = {"prompts": prompts, "output": workload.outputs, "at_once": workload.at_once}
        answer = self.ask(job)
        return workload.figure(answer["seconds"], answer["firsts"])

    def stop(self) -> None:
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()


def find(pythons: Mapping[str, str], folder: str | None) -> tuple[list[Peer], list[str]]:
    """The engines that are here, ours first, and why others are not."""
    peers, missing = [Peer("penstock", [sys.executable, str(WORKER), "penstock"])], []
    for name, module in MODULES.items():
        python = pythons.get(name, sys.executable)
        probe = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        if subprocess.run([python, "-c", probe], check=False, capture_output=True).returncode:
            missing.append(f"{name}: no {module} in {python}")
        elif name == "vllm" and folder is None:
            missing.append("vllm: needs --folder (it does not read this GGUF file)")
        else:
            peers.append(Peer(name, [python, str(WORKER), name]))
    if not any(peer.name == "llama.cpp" for peer in peers):
        if shutil.which("llama-server"):
            peers.append(Peer("llama-server", [sys.executable, str(WORKER), "llama-server"]))
        else:
            missing.append("llama-server: not on the path")
    return peers, missing


def show(peers: list[Peer], chosen: dict[str, PeerWorkload], console: Console) -> dict[str, Any]:
    ours = peers[0]
    rows = report.table(
        "Medians; ratio above 1: Penstock is better", "workload", *(peer.name for peer in peers), "ratio"
    )
    results: dict[str, Any] = {}
    lines = [
        (name, workload.unit, {p.name: p.figures.get(name, []) for p in peers}) for name, workload in chosen.items()
    ]
    lines.append(("start to ready", "s", {peer.name: [peer.ready_s] for peer in peers}))
    for name, unit, figures in lines:
        middle = {who: statistics.median(values) for who, values in figures.items() if values}
        lower_is_better = unit in ("s", "ms to first token")
        others = [value for who, value in middle.items() if who != ours.name]
        best = (min if lower_is_better else max)(others) if others else None
        mine = middle.get(ours.name)
        ratio = None if best is None or mine is None else (best / mine if lower_is_better else mine / best)
        cells = [report.number(middle.get(peer.name), 2 if unit == "s" else 1) for peer in peers]
        rows.add_row(f"{name}, {unit}", *cells, "–" if ratio is None else f"{ratio:.2f}x")
        results[name] = {"unit": unit, "runs": figures, "medians": middle, "ratio_to_best_peer": ratio}
    console.print(rows)
    return results


def main(settings: CpuPeersBenchSettings, json_file: Path | None, console: Console) -> None:
    chosen = workloads(settings.requests_per_slot)
    unknown = [name for name in settings.workloads if name not in chosen]
    if unknown:
        raise ConfigError(f"unknown workload {unknown[0]!r}; there are: {', '.join(chosen)}")
    if settings.isa is not None and settings.isa not in isa_choices()[1:]:
        raise ConfigError(f"unknown instruction set {settings.isa!r}; there are: {', '.join(isa_choices()[1:])}")
    chosen = {name: chosen[name] for name in settings.workloads or chosen}
    path = resolve(settings.model)
    vocabulary = int(open_checkpoint(path).config["vocab_size"])
    peers, missing = find(settings.pythons, settings.folder)
    if settings.peers:
        peers = [peer for peer in peers if peer.name in ("penstock", *settings.peers)]
    loading = {
        "model": str(path), "folder": settings.folder, "threads": settings.threads, "port": free_port(),
        "slots": max(workload.at_once for workload in chosen.values()),
        "context": max(workload.inputs + workload.outputs for workload in chosen.values()) + 16,
        "flash_attention": settings.flash_attention, "program": shutil.which("llama-server"),
        "quiet": not settings.verbose, "isa": settings.isa,
    }  # fmt: skip
    limited = f", Penstock without more than {settings.isa}" if settings.isa else ""
    console.print(f"[bold]{settings.model}[/bold], {settings.threads} threads: {report.machine_line()}{limited}")
    for reason in missing:
        console.print(f"not here: {reason}", style="dim")
    running: list[Peer] = []
    try:
        for peer in peers:
            try:
                peer.start(loading | {"model": settings.peer_models.get(peer.name, str(path))})
                running.append(peer)
            except RuntimeError as error:
                console.print(f"left out: {error}", style="yellow")
                peer.stop()
        for name, workload in chosen.items():
            for turn in range(settings.rounds + 1):  # the first is a warm-up and not counted
                for peer in running:
                    with console.status(f"{name}, turn {turn} of {settings.rounds}: {peer.name}"):
                        figure = peer.run(workload, vocabulary, turn)
                    if turn:
                        peer.figures.setdefault(name, []).append(figure)
            medians = ", ".join(f"{p.name} {report.number(statistics.median(p.figures[name]))}" for p in running)
            console.print(f"{name}, {workload.unit}: {medians}", style="dim")  # a run cut short has shown something
    finally:
        for peer in running:
            peer.stop()
    results = show(running, chosen, console)
    if json_file is not None:
        report.write_json(json_file, "cpu_peers", loading | {"rounds": settings.rounds}, results)
