"""`penstock bench compare`: this engine and `transformers` generate, same weights, same prompts, same process.

The two take turns (A B A B ...), because a shared machine drifts by more than most differences worth knowing;
medians are compared, and a gap under a quarter is called a tie. transformers runs in whichever dtype is fastest
for it here. Both sides get the same random prompts and produce the same number of tokens, greedily.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from penstock.bench import offline, report
from penstock.bench.engine import BenchError, run
from penstock.bench.workloads import Workload
from penstock.engine.backends.select import plain_backend
from penstock.errors import PenstockError

TIE = 1.25


@dataclass(frozen=True, slots=True)
class CompareBenchSettings:
    model: str = "smollm2-135m"
    batch: int = 16
    input_len: int = 128
    output_len: int = 128
    rounds: int = 3
    device: str = "auto"
    threads: int | None = None

    @property
    def workload(self) -> Workload:
        ends = (self.input_len, self.input_len), (self.output_len, self.output_len)
        return Workload(f"batch{self.batch}", self.batch, *ends)


def peer_library() -> Any:
    """Imported only here and only when asked for: it is a tool of this comparison, not a dependency."""
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise PenstockError(
            "transformers is not installed, so there is nothing to compare with. Install it: pip install transformers"
        ) from None


class Peer:
    """A transformers model holding exactly the checkpoint's tensors."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        transformers = peer_library()
        settings = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
        peer_config = transformers.AutoConfig.for_model(config["model_type"], **settings)
        self.device = device
        self._backend = plain_backend(device)
        self.model = transformers.AutoModelForCausalLM.from_config(peer_config, dtype=torch.float32).eval()
        self._tensors = tensors
        self._tied = bool(config.get("tie_word_embeddings"))
        self._fill()
        self.model.tie_weights()
        self.model.to(device)
        # Ids that end generation would cut the reply short; the work must be the same on both sides.
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0

    def use(self, dtype: torch.dtype) -> None:
        """Rounds from the checkpoint itself, not from the dtype before."""
        self.model.to(dtype)
        self._fill()

    def _fill(self) -> None:
        missing, unexpected = self.model.load_state_dict(self._tensors, strict=False)
        missing = [name for name in missing if not (self._tied and name == "lm_head.weight")]
        if missing or unexpected:
            raise BenchError(f"transformers did not take the weights: missing {missing}, unexpected {unexpected}")

    def generate(self, prompts: list[list[int]], output_len: int) -> float:
        """Seconds for one batch."""
        ids = torch.tensor(prompts, device=self.device)
        begin = time.perf_counter()
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_len, do_sample=False
            )
        self._backend.synchronize()
        seconds = time.perf_counter() - begin
        if out.shape[1] != ids.shape[1] + output_len:
            raise BenchError(f"transformers gave {out.shape[1] - ids.shape[1]} of {output_len} tokens")
        return seconds

    def fastest_dtype(self, prompts: list[list[int]], tell: Callable[[str], None]) -> torch.dtype:
        """Tries a few steps in each dtype the hardware may like; leaves the model in the fastest. A first run of
        a few tokens rules out those the hardware emulates, which can be a hundred times slower."""
        short = [prompt[:16] for prompt in prompts]
        times: dict[torch.dtype, float] = {}
        tastes: list[float] = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tell(f"transformers: trying {str(dtype).removeprefix('torch.')}")
            self.use(dtype)
            tastes.append(min(self.generate([prompts[0][:4]], 1) for _ in range(2)))
            if tastes[-1] > 4 * min(tastes):
                continue
            self.generate(short, 2)
            times[dtype] = min(self.generate(short, 6) for _ in range(2))
        best = min(times, key=lambda dtype: times[dtype])
        self.use(best)
        return best


def verdict(ratio: float) -> str:
    if ratio >= TIE:
        return f"Penstock is {ratio:.2f}x as fast"
    if ratio <= 1 / TIE:
        return f"transformers is {1 / ratio:.2f}x as fast"
    return f"a tie ({ratio:.2f}x; under {TIE:.2f}x either way says nothing on a shared machine)"


def main(settings: CompareBenchSettings, json_file: Path | None, console: Console) -> None:
    transformers = peer_library()
    transformers.utils.logging.set_verbosity_error()
    workload = settings.workload
    loading = offline.OfflineBenchSettings(
        model=settings.model, device=settings.device, threads=settings.threads, max_running=settings.batch
    )
    loaded = offline.load(loading, [workload], console)
    info = loaded.engine.info
    prompts = [request.prompt for request in workload.build(info.vocab_size)]
    ours: list[float] = []
    theirs: list[float] = []
    # torch warns at length where it emulates a dtype; trying them is the point here.
    with warnings.catch_warnings(action="ignore"), console.status("transformers: loading the same weights") as status:
        tensors = {name: loaded.checkpoint.tensor(name) for name in loaded.checkpoint.names()}
        peer = Peer(loaded.checkpoint.config, tensors, torch.device(info.device))
        dtype = peer.fastest_dtype(prompts, status.update)
        status.update("warm-up")
        run(loaded.engine, workload, salt="warm-up")
        peer.generate(prompts, 8)
        tokens = settings.batch * settings.output_len
        for attempt in range(settings.rounds):
            status.update(f"round {attempt + 1} of {settings.rounds}: Penstock")
            ours.append(tokens / run(loaded.engine, workload, salt=f"run{attempt}").seconds)
            status.update(f"round {attempt + 1} of {settings.rounds}: transformers")
            theirs.append(tokens / peer.generate(prompts, settings.output_len))
    name = str(dtype).removeprefix("torch.")
    console.print(f"[bold]{settings.model}[/bold] on {info.device}: {report.machine_line()}")
    columns = ("output tok/s", "numbers", "median", *(f"round {attempt + 1}" for attempt in range(settings.rounds)))
    title = f"Batch of {settings.batch}, {settings.input_len} in / {settings.output_len} out, greedy, alternating"
    rows = report.table(title, *columns)
    for label, kind, values in (
        ("Penstock", loaded.numbers, ours),
        (f"transformers {transformers.__version__}", name, theirs),
    ):
        figures = (statistics.median(values), *values)
        rows.add_row(label, kind, *(report.number(value) for value in figures))
    console.print(rows)
    ratio = statistics.median(ours) / statistics.median(theirs)
    console.print(verdict(ratio), style="bold")
    if json_file is not None:
        results = {"ours": ours, "transformers": theirs, "ratio": ratio, "transformers_dtype": name}
        report.write_json(json_file, "compare", dataclasses.asdict(settings) | {"numbers": loaded.numbers}, results)
