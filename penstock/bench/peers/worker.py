"""One engine behind a pipe, for `penstock bench cpu-peers`: JSON lines in, JSON lines out.

The first line says what to load; the answer `{"ready": true}` says that it is loaded. Every further line is a closed
loop (prompts of token ids, how many at once, how many tokens each), answered with its seconds and first-token times.
Runs under the interpreter of its engine: the standard library and the engine are all it imports.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

Prompt = list[int]


class BenchedEngine(Protocol):
    """What the loop needs: run all prompts, at most `at_once` of them together, and time their first tokens."""

    def run(self, prompts: Sequence[Prompt], output: int, at_once: int) -> list[float]: ...


def limit(isa: str) -> None:
    """This process computes as on a CPU that has no more than an instruction set; before PyTorch is imported."""
    if isa in ("generic", "avx2", "avxvnni"):
        os.environ["ATEN_CPU_CAPABILITY"] = "avx2"
        os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX2"
    from penstock.engine.backends.cpu import native

    native.limit_to(isa)


class Penstock:
    """The engine in this process, step by step."""

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings["isa"] is not None:
            limit(settings["isa"])
        from penstock.engine.config import EngineConfig
        from penstock.engine.core import Engine

        config = EngineConfig(
            model=settings["model"], threads=settings["threads"], max_running=settings["slots"],
            max_model_len=settings["context"], prefix_cache=False, device="cpu",
        )  # fmt: skip
        self.engine = Engine.load(config)

    def run(self, prompts: Sequence[Prompt], output: int, at_once: int) -> list[float]:
        from penstock.engine.request import Request, SamplingParams

        engine, waiting, running = self.engine, list(enumerate(prompts))[::-1], 0
        begun: dict[str, float] = {}
        firsts: dict[str, float] = {}
        while waiting or running:
            while waiting and running < at_once:
                index, prompt = waiting.pop()
                begun[str(index)] = time.perf_counter()
                engine.submit(Request(str(index), prompt, SamplingParams(max_tokens=output, temperature=0.0)))
                running += 1
            result = engine.step()
            for delta in result.deltas if result is not None else ():
                if delta.error is not None:
                    raise RuntimeError(delta.error)
                firsts.setdefault(delta.request_id, time.perf_counter() - begun[delta.request_id])
                running -= delta.finish_reason is not None
        return list(firsts.values())


class _Threaded(ABC):
    """Engines that answer one blocking call per request: as many threads as requests at once."""

    @abstractmethod
    def complete(self, prompt: Prompt, output: int) -> float:
        """Run one request and return the time to its first token."""

    def run(self, prompts: Sequence[Prompt], output: int, at_once: int) -> list[float]:
        waiting: queue.SimpleQueue[Prompt] = queue.SimpleQueue()
        for prompt in prompts:
            waiting.put(prompt)
        firsts: list[float] = []
        failures: list[BaseException] = []

        def slot() -> None:
            while not failures:
                try:
                    prompt = waiting.get_nowait()
                except queue.Empty:
                    return
                try:
                    firsts.append(self.complete(prompt, output))
                except BaseException as error:
                    failures.append(error)

        threads = [threading.Thread(target=slot) for _ in range(min(at_once, len(prompts)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return firsts


def _completion(prompt: Prompt, output: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "n_predict": output, "ignore_eos": True, "temperature": 0, "cache_prompt": False,
        "stream": False,
    }  # fmt: skip


def _first_token(answer: dict[str, Any], output: int) -> float:
    timings = answer["timings"]
    if timings["predicted_n"] != output:
        raise RuntimeError(f"{timings['predicted_n']} of {output} tokens")
    return float(timings["prompt_ms"]) / 1e3


class LlamaCpp(_Threaded):
    """llama.cpp in this process, through `xllamacpp`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = settings["model"]
        params.n_parallel = settings["slots"]
        params.n_ctx = settings["slots"] * settings["context"]
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
        params.flash_attn_type = getattr(
            xllamacpp.llama_flash_attn_type,
            "LLAMA_FLASH_ATTN_TYPE_" + ("ENABLED" if settings["flash_attention"] else "DISABLED"),
        )
        params.kv_unified = False
        params.n_gpu_layers = 0
        self.server = xllamacpp.Server(params)

    def complete(self, prompt: Prompt, output: int) -> float:
        request = {"prompt": prompt, "max_tokens": output, **_completion(prompt, output)}
        answer = self.server.handle_completions(request)
        if "timings" not in answer:
            raise RuntimeError(f"unexpected answer: {str(answer)[:300]}")
        return _first_token(answer, output)


class LlamaServer(_Threaded):
    """llama.cpp as the program `llama-server`, over HTTP."""

    def __init__(self, settings: dict[str, Any]) -> None:
        port, threads = str(settings["port"]), str(settings["threads"])
        self.url = f"http://127.0.0.1:{port}"
        command = [
            settings["program"], "-m", settings["model"], "--port", port, "-t", threads, "-tb", threads,
            "-np", str(settings["slots"]), "-c", str(settings["slots"] * settings["context"]), "-ngl", "0",
            "-fa", "on" if settings["flash_attention"] else "off", "--no-kv-unified",
        ]  # fmt: skip
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while True:
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                time.sleep(0.02)

    def complete(self, prompt: Prompt, output: int) -> float:
        body = json.dumps(_completion(prompt, output)).encode()
        request = urllib.request.Request(f"{self.url}/completion", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as reply:
            return _first_token(json.load(reply), output)


class _Batched(ABC):
    """Engines that take a list of prompts: requests of equal length end together, so a loop is batch after batch."""

    @abstractmethod
    def generate(self, prompts: Sequence[Prompt], output: int) -> list[float]:
        """Run the prompts together and return the times to their first tokens."""

    def run(self, prompts: Sequence[Prompt], output: int, at_once: int) -> list[float]:
        parts = [prompts[at : at + at_once] for at in range(0, len(prompts), at_once)]
        return [first for part in parts for first in self.generate(part, output)]


class Vllm(_Batched):
    """vLLM's CPU build. It reads folders of safetensors, not GGUF files.

    As quick as it gets for token ids: without a second process, without text. Its own advice (preload libiomp and
    tcmalloc, bind threads with VLLM_CPU_OMP_THREADS_BIND) is left to the environment.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
        import vllm

        self.sampling: Callable[..., Any] = vllm.SamplingParams
        self.llm = vllm.LLM(
            settings["folder"], dtype="bfloat16", max_num_seqs=settings["slots"], max_model_len=settings["context"],
            enable_prefix_caching=False, disable_log_stats=False, skip_tokenizer_init=True,
        )  # fmt: skip

    def generate(self, prompts: Sequence[Prompt], output: int) -> list[float]:
        sampling = self.sampling(max_tokens=output, temperature=0.0, ignore_eos=True, detokenize=False)
        answers = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [answer.metrics.first_token_latency for answer in answers if answer.metrics is not None]


class OpenVino(_Batched):
    """OpenVINO GenAI with continuous batching; reads GGUF files, and folders in its own format."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import openvino_genai as genai

        scheduling = genai.SchedulerConfig()
        scheduling.max_num_seqs = settings["slots"]
        scheduling.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": settings["threads"]}
        self.genai = genai
        self.pipe = genai.LLMPipeline(settings["model"], "CPU", scheduler_config=scheduling, **properties)

    def generate(self, prompts: Sequence[Prompt], output: int) -> list[float]:
        import numpy
        import openvino

        config = self.genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        ids = openvino.Tensor(numpy.array(prompts, numpy.int64))
        mask = openvino.Tensor(numpy.ones((len(prompts), len(prompts[0])), numpy.int64))
        answer = self.pipe.generate(self.genai.TokenizedInputs(ids, mask), config)
        if any(len(tokens) != output for tokens in answer.tokens):
            raise RuntimeError("fewer tokens than asked for")
        return [answer.perf_metrics.get_ttft().mean / 1e3]


ENGINES: dict[str, Callable[[dict[str, Any]], BenchedEngine]] = {
    "penstock": Penstock, "llama.cpp": LlamaCpp, "llama-server": LlamaServer, "vllm": Vllm, "openvino": OpenVino,
}  # fmt: skip


def main() -> None:
    # Engines print what they like to standard output; the pipe stays clean.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    engine = ENGINES[sys.argv[1]](settings)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        begin = time.perf_counter()
        firsts = engine.run(job["prompts"], job["output"], job["at_once"])
        print(json.dumps({"seconds": time.perf_counter() - begin, "firsts": firsts}), file=answers)
    if isinstance(engine, LlamaServer):
        engine.process.terminate()


if __name__ == "__main__":
    main()
