"""Settings of automatic scaling: how many replicas of a model run, between which limits, and what decides it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, tzinfo
from typing import Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from penstock.config.fields import setting

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_TIME = re.compile(r"([01]\d|2[0-3]):([0-5]\d)|24:00")


def zone(name: str) -> tzinfo:
    """The time zone of this name; UTC also where the system has no list of zones."""
    return UTC if name == "UTC" else ZoneInfo(name)


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """A known busy time: at least this many replicas are ready from `start` to `end`."""

    start: str = setting("00:00", doc="When it begins, as HH:MM.", example='"08:00"')
    end: str = setting("24:00", doc="When it ends; a time before start is on the next day.", example='"18:00"')
    days: tuple[Day, ...] = setting((), doc="Days on which it begins; empty: every day.", example="[mon, tue]")
    min: int = setting(1, doc="Minimum of replicas in this time.", least=0, most=256)
    timezone: str = setting("UTC", doc="Time zone of start and end.", example="Europe/Berlin")


@dataclass(frozen=True, slots=True)
class AutoscaleConfig:
    """Automatic scaling of one model."""

    min: int = setting(1, doc="Minimum of replicas; 0: none while idle, and a request starts one.", least=0, most=256)
    max: int = setting(4, doc="Maximum of replicas.", least=1, most=256)
    target_utilisation: float = setting(
        0.7, doc="Share of a replica's capacity that should be in use; the rest is for bursts.", least=0.05, most=1
    )
    concurrency: int | None = setting(
        None, doc="Requests that a replica runs at full capacity; when not set, the engine's max_running.",
        least=1, example="32",
    )  # fmt: skip
    replica_rate: float | None = setting(
        None, doc="Requests per second that a replica answers at full capacity; when not set, learned from busy times.",
        least=0.0001, example="4.5",
    )  # fmt: skip
    target_wait_s: float = setting(
        1.0, doc="Predicted wait in the queue, in seconds, above which replicas are added.", least=0.01
    )
    drain_s: float = setting(30.0, doc="Seconds in which a backlog should be worked off.", least=1)
    kv_high: float = setting(
        0.85, doc="Share of the KV cache in use above which replicas are added.", least=0.05, most=1
    )
    scale_up_cooldown_s: float = setting(15.0, doc="Minimum seconds between two scale-ups.", least=0)
    scale_down_cooldown_s: float = setting(60.0, doc="Minimum seconds between any change and a scale-down.", least=0)
    stabilisation_s: float = setting(
        300.0, doc="Replicas stop only when fewer were enough for this many seconds.", least=0
    )
    hysteresis: float = setting(
        0.15, doc="How far below the targets the load must be for a scale-down, as a share.", least=0, most=0.9
    )
    step_up: float = setting(
        1.0, doc="Maximum of replicas added at once, as a share of the present ones; 4 are always allowed.", least=0.01
    )
    step_down: float = setting(
        0.5, doc="Maximum of replicas stopped at once, as a share of the present ones; 1 is always allowed.",
        least=0.01, most=1,
    )  # fmt: skip
    cold_start_s: float | None = setting(
        None, doc="Seconds from starting a replica until it is ready; when not set, as measured.", least=0, example="60"
    )
    forecast: bool = setting(True, doc="Look ahead by the cold-start time along the trend of arrivals.")
    schedules: tuple[ScheduleConfig, ...] = setting(
        (), doc="Known busy times: a minimum from start to end, ready in time.",
        example='[{days: [mon, tue, wed, thu, fri], start: "08:00", end: "18:00", min: 2}]',
    )  # fmt: skip
    idle_s: float = setting(
        300.0, doc="With min: 0, seconds without a request after which the last replica stops.", least=1
    )
    hold_s: float = setting(
        60.0, doc="With min: 0, seconds that a request waits for the first replica before it gets 503.", least=0
    )
    hold: int = setting(
        256, doc="With min: 0, requests of a gateway that wait for the first replica; others get 503.", least=1
    )
    spot: float = setting(0.0, doc="Share of the replicas above spot_base that run on spot capacity.", least=0, most=1)
    spot_base: int = setting(1, doc="Replicas that never run on spot capacity.", least=0)

    def problems(self) -> list[str]:
        """Settings that contradict each other, each as a sentence."""
        found = []
        if self.min > self.max:
            found.append(f"min ({self.min}) must be at most max ({self.max})")
        for index, schedule in enumerate(self.schedules):
            where = f"schedules[{index}]"
            for key, text in (("start", schedule.start), ("end", schedule.end)):
                if not _TIME.fullmatch(text):
                    found.append(f"{where}.{key}: expected a time such as 08:30, found {text!r}")
            if schedule.start == "24:00":
                found.append(f"{where}.start: write 00:00 of the next day")
            if schedule.start == schedule.end:
                found.append(f"{where}: start and end are the same; for the whole day write 00:00 and 24:00")
            if schedule.min > self.max:
                found.append(f"{where}.min ({schedule.min}) must be at most max ({self.max})")
            try:
                zone(schedule.timezone)
            except (ZoneInfoNotFoundError, ValueError, OSError):
                found.append(f"{where}.timezone: there is no time zone {schedule.timezone!r}; UTC always works")
        return found
