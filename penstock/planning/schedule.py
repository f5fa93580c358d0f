"""The minimum that schedules ask for at a moment: days and times of day in a time zone, nothing else."""

from __future__ import annotations

from datetime import datetime, timedelta

from penstock.config.autoscale import DAYS, AutoscaleConfig, ScheduleConfig, zone


def scheduled_min(config: AutoscaleConfig, at: float) -> int:
    """The minimum of replicas at Unix time `at`."""
    minima = [schedule.min for schedule in config.schedules if covers(schedule, at)]
    return min(max(config.min, *minima, 0), config.max)


def covers(schedule: ScheduleConfig, at: float) -> bool:
    """Whether Unix time `at` lies in the schedule; an end before the start is on the next day."""
    moment = datetime.fromtimestamp(at, zone(schedule.timezone))
    minute = moment.hour * 60 + moment.minute
    start, end = _minutes(schedule.start), _minutes(schedule.end)
    if start < end:
        return start <= minute < end and _on(schedule, moment)
    if minute >= start:
        return _on(schedule, moment)
    return minute < end and _on(schedule, moment - timedelta(days=1))


def _on(schedule: ScheduleConfig, begun: datetime) -> bool:
    return not schedule.days or DAYS[begun.weekday()] in schedule.days


def _minutes(time: str) -> int:
    hours, minutes = time.split(":")
    return int(hours) * 60 + int(minutes)
