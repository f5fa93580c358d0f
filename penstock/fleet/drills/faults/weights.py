"""An engine whose weights are damaged when it is restarted: it must refuse to start, and say why."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.fleet.drills.run import Fault, Stage
from penstock.fleet.drills.throwaway import ThrowAway

_REFUSES_S = 300.0


async def weights(fleet: ThrowAway, stage: Stage) -> None:
    victim = fleet.engines[0]
    file = _weights(fleet.copy_of_model())
    whole = file.stat().st_size
    victim.kill()
    with file.open("r+b") as damaged:
        damaged.truncate(whole // 2)
    stage.broken(f"{victim.name} killed, and half of its {file.name} is gone")
    mark = victim.log.stat().st_size
    victim.start()
    assert victim.process is not None
    try:
        code = await asyncio.wait_for(asyncio.to_thread(victim.process.wait), _REFUSES_S)
    except TimeoutError:
        stage.wrong(f"{victim.name} runs with damaged weights")
        victim.kill()
        code = 0
    said = victim.log.read_text(errors="replace")[mark:].strip()
    if code == 0 or file.name not in said:
        stage.wrong(f"{victim.name} ended with {code} and did not name {file.name}: {said[-300:]}")
    stage.notes.append(f"it said: {said.splitlines()[-1][:300] if said else 'nothing'}")
    fleet.copy_of_model()
    victim.start()
    stage.healed("the weights are restored, and the engine is started again")


def _weights(model: Path) -> Path:
    if model.is_file():
        return model
    return max(model.glob("*.safetensors"), key=lambda file: file.stat().st_size)


FAULTS = (Fault("weights", "an engine restarts with damaged weights", weights),)
