"""Settings of experiments: how traffic is split between models, and what happens by itself."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting

CONTROL = "control"


@dataclass(frozen=True, slots=True)
class ExperimentConfig:
    """Traffic split between a model and its canaries, with rollback when a canary is worse, and shadow traffic."""

    name: str = setting(
        "",
        doc="What clients send: a new name, or that of a model, adapter, remote or route whose traffic is split.",
    )
    control: str = setting("", doc="Answers everything that no canary gets; empty: what `name` means without this.")
    canary: dict[str, float] | None = setting(  # noqa: RUF009
        None, doc="Models (adapters, remotes, routes) that get a share of the requests.", share=True,
        example="{v2: 5%}",
    )  # fmt: skip
    sticky: Literal["user", "session", "tenant", "request"] = setting(
        "user", doc="What stays in its arm. user: a user, without one a session; session: the other way round."
    )
    fallback: bool = setting(
        True, doc="A request that a canary fails before its first token is answered by the control; it still counts."
    )
    shadow: dict[str, float] | None = setting(  # noqa: RUF009
        None, doc="Models that also get a share of the requests; their answers are measured and thrown away.",
        share=True, example="{v3: 10%}",
    )  # fmt: skip
    shadow_queue: int = setting(64, doc="Shadow requests that may wait per gateway process; more are dropped.", least=0)
    shadow_at_once: int = setting(2, doc="Shadow requests that run at one time per gateway process.", least=1)
    judge: float = setting(0.0, doc="Share of the answers of all arms that the judge grades.", share=True)
    rollback: bool = setting(True, doc="Roll a canary back by itself once it is certainly worse than the control.")
    confidence: float = setting(
        0.99, doc="Probability that no canary as good as the control is rolled back, in the whole experiment.",
        least=0.5, most=0.999999,
    )  # fmt: skip
    worse_errors: float | None = setting(
        0.01, doc="Tolerated difference between error rates; null: they are not compared.", share=True
    )
    most_errors: float | None = setting(
        0.5, doc="Error rate that rolls a canary back whatever the control does; null: none.", share=True
    )
    worse_quality: float | None = setting(
        0.05, doc="Tolerated difference between grades, and between shares of votes down; null: not compared.",
        share=True,
    )  # fmt: skip
    worse_ttft: float | None = setting(
        2.0, doc="Tolerated ratio of times to first token; null: they are not compared.", least=1
    )
    worse_latency: float | None = setting(
        None, doc="Tolerated ratio of whole latencies; null: they are not compared.", least=1, example="1.5"
    )
    least_requests: int = setting(10, doc="Requests of a canary before it may be rolled back.", least=1)
    window_s: float = setting(600.0, doc="Seconds of the newest requests that are compared on their own.", least=1)
    stages: tuple[float, ...] = setting(
        (), doc="Shares to which a canary that does as well as the control is promoted by itself, step by step.",
        share=True, example="[5%, 25%, 50%, 100%]",
    )  # fmt: skip
    stage_requests: int = setting(200, doc="Requests of the canary in a stage before the next.", least=1)
    stage_s: float = setting(600.0, doc="Seconds of a stage before the next.", least=0)
    stage_margin: float = setting(
        0.05, doc="For the next stage the canary's error rate is certainly at most so much above the control's.",
        share=True,
    )  # fmt: skip

    @property
    def canaries(self) -> dict[str, float]:
        return self.canary or {}

    @property
    def shadows(self) -> dict[str, float]:
        return self.shadow or {}


def problems(experiments: Sequence[ExperimentConfig], names: Collection[str] | None) -> list[str]:
    """Mistakes in experiments. `names`: of the models, aliases, adapters, remotes and routes of the configuration;
    None: a fleet says later what there is."""
    found: list[str] = []
    splits = {experiment.name for experiment in experiments}
    for index, one in enumerate(experiments):
        where = f"experiments[{index}]"
        if not one.name:
            found.append(f"{where}: name is needed: what clients send as `model`")
        if one.name in {other.name for other in experiments[:index]}:
            found.append(f'{where}: there are two experiments called "{one.name}"')
        if not one.control and one.name and names is not None and one.name not in names:
            found.append(f'{where}: control is needed, because no model or route is called "{one.name}"')
        if not one.canaries and not one.shadows:
            found.append(f"{where}: canary or shadow is needed: the models that take part")
        if sum(one.canaries.values()) > 1 + 1e-9:
            found.append(f"{where}.canary: the shares add up to more than 100%")
        if one.stages and (len(one.canaries) != 1 or list(one.stages) != sorted(set(one.stages)) or one.stages[0] <= 0):
            found.append(f"{where}.stages: rising shares above 0, for exactly one canary")
        arms = [("canary", arm) for arm in one.canaries] + [("shadow", arm) for arm in one.shadows]
        for key, arm in (("control", one.control), *arms):
            if key != "control" and arm in (CONTROL, one.control or one.name, one.name):
                found.append(f'{where}.{key}: "{arm}" is the control, or a name of it')
            elif arm and names is not None and arm not in names:
                found.append(f'{where}.{key}: there is no model or route "{arm}"')
            elif arm in splits - {one.name}:
                found.append(f'{where}.{key}: "{arm}" is split by an experiment of its own')
    return found
