"""Any mix of features, on any family, says what a plain engine says that runs one request at a time: the same tokens,
greedy or sampled, and the same log-probabilities.

`mixes` draws engines and requests. Other tests have two or three features at a time and know what each must do; here it
only matters that nothing changes: preemption, tiers, draft tokens, adapters, sleep, restarts, failed steps, thoughts,
grammars, token rules, penalties and watermarks, all at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.bench.soak.check import verify
from penstock.bench.soak.drive import Answer, Faults
from penstock.bench.soak.engines import verify_everything
from penstock.bench.soak.traffic import Case
from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.config import EngineConfig
from penstock.engine.core import Engine
from penstock.engine.request import Request, SamplingParams
from penstock.engine.sleep.sleep import EngineSleep
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, drain, generate, read_at_once
from tests.engine.mixes import ADAPTERS, FORMS, VOCAB, WINDOW, Mix, Talk, compiler, draw_mix
from tests.engine.speculative.forced import Oracle
from tests.engine.speculative.mtp_layers import write_mtp
from tests.engine.speculative.plain_mtp import PLAIN
from tests.engine.tiny import write_checkpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "kv_a_proj_with_mqa", "in_proj")


class Files:
    """Checkpoints and adapters, each written once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.model: Callable[[str], Path] = cache(self._model)
        self.mtp: Callable[[str], Path] = cache(self._mtp)
        self.adapter: Callable[[str, int], Path] = cache(self._adapter)

    def _model(self, family: str) -> Path:
        return write_checkpoint(family, self.root / family / "model", spread=0.3)

    def _mtp(self, family: str) -> Path:
        folder = self.root / family / "mtp"
        return PLAIN[family].write(family, folder) if family in PLAIN else write_mtp(family, folder)

    def _adapter(self, family: str, seed: int) -> Path:
        folder, targets = self.root / family / f"adapter-{seed}", TARGETS[: 4 if seed else 6]
        return write_adapter(folder, self.model(family), targets=targets, seed=seed, rank=2 + 2 * seed)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("mixes"))


class Subject:
    """The engine of a mix, and the plain one that it is compared with."""

    def __init__(self, mix: Mix, files: Files, disk: Path) -> None:
        self.mix = mix
        model = files.mtp(mix.family) if mix.drafts == "mtp" else files.model(mix.family)
        own = dict(mix.settings)
        if mix.drafts in ("ngram", "oracle"):
            own["speculation"] = "ngram"
        elif mix.drafts == "draft":
            own |= {"speculation": "draft", "draft_model": str(files.model("llama-gqa"))}
        elif mix.drafts == "mtp":
            own["speculation"] = "mtp"
        if "disk_memory" in own:
            own["disk_path"] = str(disk)
        specs = tuple(AdapterSpec(name, str(files.adapter(mix.family, n))) for n, name in enumerate(ADAPTERS))
        common = EngineConfig(
            str(model), device="cpu", dtype="float32", threads=1, max_model_len=WINDOW, target_gap_ms=1e6,
            adapters=specs if mix.adapters else (), **mix.shared,
        )  # fmt: skip
        if mix.adapters:
            own |= {"adapter_slots": 2, "adapter_host_slots": 2}
        block = int(own["block_size"])
        alone = {"max_running": 1, "block_size": block, "num_blocks": WINDOW // block + 2, "prefix_cache": False}
        self.plain = Engine.load(replace(common, **alone), grammars=compiler)
        self.config = replace(common, **own)
        self.said: dict[str, list[int]] = {}
        """What requests have to be answered with, for the oracle."""
        self.counts: Counter[str] = Counter()
        self.sleeper = EngineSleep(self.config, self.load)
        self.engine = self.load(self.config)

    def load(self, config: EngineConfig) -> Engine:
        engine = Engine.load(config, grammars=compiler)
        if self.mix.adapters:
            read_at_once(engine)
        if self.mix.ahead:
            engine._depth = 1
        if engine.speculation is not None:
            verify_everything(engine.speculation)
            engine.speculation._clock = lambda: 0.0
            engine.speculation.proposer.seconds = lambda sequences: 0.0  # type: ignore[method-assign]
            if self.mix.drafts == "oracle":
                engine.speculation.proposer = Oracle(self.said, wrong=0.25, vocab_size=VOCAB, seed=self.mix.seed)
        # Grammars are compiled on threads: when they are ready must not decide what runs together.
        known = (SamplingParams(max_tokens=1, grammar=form.grammar) for form in FORMS)
        generate(engine, *(Request(f"first {n}", [1], params) for n, params in enumerate(known)))
        return engine

    def close(self) -> None:
        self.engine.close()
        self.plain.close()

    def between(self) -> None:
        """What happens between two turns."""
        self.count()
        if self.mix.between == "sleep":
            self.engine = self.sleeper.wake(self.sleeper.sleep(self.engine))
        elif self.mix.between == "restart":
            self.engine.close()
            self.engine = self.load(self.config)

    def count(self) -> None:
        load = self.engine.load_snapshot()
        for name in ("preemptions", "accepted_tokens", "restored_blocks", "disk_read_blocks", "prefix_hit_tokens"):
            self.counts[name] += getattr(load, name)

    def turn(self, cases: list[Case]) -> dict[str, list[int]]:
        """Run the cases together, compare each with the plain engine; what was said."""
        if self.mix.drafts == "oracle":
            self.said |= {case.request.request_id: self.alone(case.request) for case in cases}
        answers = {case.request.request_id: Answer(case) for case in cases}
        waiting, rng = list(cases), random.Random(self.mix.seed)
        ends = {case.request.request_id: case.after for case in cases if case.fate == "cancel"}
        with ExitStack() as stack:
            if self.mix.faults:
                stack.enter_context(Faults(self.engine, rng, self.mix.faults))
            while waiting or self.engine.has_work:
                for _ in range(min(rng.choice((0, 1, 3)), len(waiting))):
                    self.engine.submit(waiting.pop(0).request)
                for name in [name for name, left in ends.items() if left == 0]:
                    self.engine.abort(name)
                ends = {name: left - 1 for name, left in ends.items()}
                output = self.engine.step()
                for delta in output.deltas if output is not None else ():
                    answers[delta.request_id].add(delta)
        assert_idle(self.engine)
        for answer in answers.values():
            request = answer.case.request
            answer.tokens = request.produced + answer.tokens
            whole = replace(answer.case, request=replace(request, produced=[]))
            verify(replace(answer, case=whole), self.plain, self.mix.tie)
        return {name: answer.tokens for name, answer in answers.items()}

    def alone(self, request: Request) -> list[int]:
        """What the plain engine says, from the beginning."""
        self.plain.submit(replace(request, produced=[]))
        return [token for delta in drain(self.plain) for token in delta.tokens]


def compare(mix: Mix, files: Files, disk: Path, count: int = 6) -> Counter[str]:
    """Two turns of conversations; what happened in them."""
    subject, talk = Subject(mix, files, disk), Talk(mix, count)
    try:
        cases = talk.first()
        said = subject.turn(cases)
        subject.between()
        subject.turn(talk.second(said, cases))
        subject.count()
        return subject.counts
    finally:
        subject.close()


EVERYTHING: dict[str, Any] = {
    **dict.fromkeys(("prefixes", "adapters", "ahead", "faults"), True), "drafts": "oracle", "family": "llama-gqa",
    "form": "",
}  # fmt: skip


def test_everything_at_once_says_what_a_plain_engine_says(files: Files, tmp_path: Path) -> None:
    counts = compare(draw_mix(5, host=False, between="sleep", **EVERYTHING), files, tmp_path, count=3)
    # Nothing here depends on how fast the machine is.
    assert all(counts[name] for name in ("accepted_tokens", "prefix_hit_tokens", "preemptions")), counts


@pytest.mark.slow
def test_so_does_everything_with_host_memory_and_a_disk_across_a_restart(files: Files, tmp_path: Path) -> None:
    tiers = {"host": True, "disk": True, "kept": True, "between": "restart"}
    compare(draw_mix(5, **tiers, **EVERYTHING), files, tmp_path, count=2)


@pytest.mark.slow
@pytest.mark.parametrize("mix", [draw_mix(seed) for seed in range(60)], ids=str)
def test_any_mix_of_features_says_what_a_plain_engine_says(mix: Mix, files: Files, tmp_path: Path) -> None:
    compare(mix, files, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "family",
    [
        "deepseek-v32",
        "kimi-linear",
        "axk2",
        "hy-v4",
        "gemma4-small",
        "deepseek-v4",
        "mimo-v2-flash",
        "laguna",
        "minimax-m3",
        "step3.5",
        "mistral-large4",
        "muse-glimmer",
        "muse-spark",
        "glm5-next",
    ],
)
def test_mixes_of_families_with_parts_of_their_own(family: str, seed: int, files: Files, tmp_path: Path) -> None:
    """Without adapters, which some of them refuse."""
    compare(draw_mix(seed, family=family, adapters=False), files, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", PLAIN)
def test_mixes_with_the_layers_for_multi_token_prediction_of_newer_families(
    family: str, seed: int, files: Files, tmp_path: Path
) -> None:
    tiers = {"host": True, "disk": True} if seed % 2 and family == "mimo-v2-flash" else {}
    no_adapters = {"adapters": False} if family == "deepseek-v4" else {}  # its matrices have names of their own
    compare(draw_mix(seed, family=family, drafts="mtp", **tiers, **no_adapters), files, tmp_path)
