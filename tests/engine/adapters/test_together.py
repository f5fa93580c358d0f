"""Adapters with everything else at once: speculation, preemption, prefix reuse, seeds, cancellation, reloads."""

from __future__ import annotations

import random
from pathlib import Path

from penstock.engine.adapters.spec import AdapterSpec
from penstock.engine.request import Request, SamplingParams
from tests.engine.adapters.files import write_adapter
from tests.engine.harness import assert_idle, collect, generate, make_engine, read_at_once
from tests.engine.tiny import write_checkpoint


def test_mixed_load_gives_what_each_request_gives_alone(tmp_path: Path) -> None:
    base = write_checkpoint("llama-gqa", tmp_path / "base")
    folders = [write_adapter(tmp_path / f"a{i}", base, rank=1 + i, seed=i) for i in range(5)]
    specs = tuple(AdapterSpec(folder.name, str(folder)) for folder in folders)
    rng = random.Random(4)
    shared = [rng.randrange(199) for _ in range(40)]
    requests = []
    for i in range(24):
        prompt = shared[: rng.randrange(8, 40)] + [rng.randrange(199)] * rng.randrange(1, 6)
        params = SamplingParams(max_tokens=rng.randrange(4, 20), temperature=rng.choice([0.0, 0.8]), seed=i)
        requests.append(Request(f"r{i}", prompt, params, adapter=rng.choice(["", *(s.name for s in specs)])))
    roomy = make_engine(base, adapters=specs)
    alone: dict[str, list[int]] = {}
    for request in requests:
        alone |= generate(roomy, request)

    engine = read_at_once(make_engine(
        base, adapters=specs, adapter_slots=2, adapter_host_slots=3, num_blocks=9, max_running=6, token_budget=32,
        speculation="ngram",
    ))  # fmt: skip
    gone = [request.request_id for request in requests[::5]]
    deltas = []
    for request in requests:
        engine.submit(request)
    for step in range(20_000):
        if not engine.has_work:
            break
        output = engine.step()
        deltas += output.deltas if output else []
        if step % 7 == 3 and gone:
            engine.abort(gone.pop(0))
    got = collect(delta for delta in deltas)
    aborted = {delta.request_id for delta in deltas if delta.finish_reason == "abort"}
    assert aborted
    for request in requests:
        id = request.request_id
        expected = alone[id][: len(got.get(id, []))] if id in aborted else alone[id]
        assert got.get(id, []) == expected, id
    assert_idle(engine)
    assert engine.adapters is not None
    engine.adapters.slots.check()
    state = engine.load_snapshot()
    assert state.preemptions > 0 and state.adapters is not None and state.adapters.host_evictions > 0
    assert all(status.users == 0 for status in engine.adapters.statuses())
