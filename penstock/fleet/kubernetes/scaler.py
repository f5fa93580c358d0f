"""Scaling on the whole queue: what waits in gateways and in engines, for a HorizontalPodAutoscaler or for KEDA.

A second metric, running requests against what a replica runs well, keeps replicas that are busy while nothing waits;
both are per replica, and the larger result counts. Gateways export the metrics: an engine's own figures are the same in
each, so they are merged by maximum; queues are each gateway's own and are added, unless they share one in Redis.
"""

from __future__ import annotations

import math

from penstock.config.autoscale import DAYS, AutoscaleConfig, ScheduleConfig
from penstock.config.models import ModelConfig
from penstock.fleet.kubernetes import engines
from penstock.fleet.kubernetes.deployment import Deployment
from penstock.fleet.kubernetes.groups import EngineGroup, Limits
from penstock.fleet.kubernetes.parameters import Json

WAITING, RUNNING = "penstock_requests_waiting", "penstock_requests_running"
"""External metrics that the adapter makes."""
_BATCH = {"cpu": 64, "cuda": 256}
"""Sequences that an engine runs when nothing says how many; see models[N].max_running."""


def waiting(matchers: str, by: str = "", *, shared: bool) -> str:
    """The whole queue. `shared`: gateways have one admission queue in Redis."""
    group = f" by ({by})" if by else ""
    inner = f"{by}, " if by else ""
    queue = f"penstock_queue_depth{{{matchers}}}"
    if shared:
        queue = f"max by ({inner}class) ({queue})"
    parts = [
        f"sum{group} ({queue})",
        f"sum{group} (penstock_parked_requests{{{matchers}}})",
        f"sum{group} (penstock_held_requests{{{matchers}}})",
        f"sum{group} (max by ({inner}engine) (penstock_engine_requests_waiting{{{matchers}}}))",
    ]
    # A part without series counts nothing: a model that never sleeps has no held requests, one that sleeps no engine.
    nothing = f"sum{group} (0 * penstock_parked_requests{{{matchers}}})" if by else "vector(0)"
    return " + ".join(f"({part} or {nothing})" for part in parts)


def running(matchers: str, by: str = "") -> str:
    group, inner = (f" by ({by})", f"{by}, ") if by else ("", "")
    total = f"sum{group} (max by ({inner}engine) (vllm:num_requests_running{{{matchers}}}))"
    return total if by else f"({total} or vector(0))"


def concurrency(model: ModelConfig, scale: AutoscaleConfig, device: str) -> float:
    """Running requests per replica that are wanted."""
    most = scale.concurrency or model.max_running or _BATCH[device]
    return most * scale.target_utilisation


def behavior(scale: AutoscaleConfig) -> Json:
    """How fast the number of replicas changes."""
    up = max(math.ceil(scale.scale_up_cooldown_s), 1)
    down = max(math.ceil(scale.scale_down_cooldown_s), 1)
    return {
        "scaleUp": {
            "stabilizationWindowSeconds": 0,
            "selectPolicy": "Max",
            "policies": [
                {"type": "Pods", "value": 4, "periodSeconds": min(up, 1800)},
                {"type": "Percent", "value": math.ceil(100 * scale.step_up), "periodSeconds": min(up, 1800)},
            ],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": min(math.ceil(scale.stabilisation_s), 3600),
            "selectPolicy": "Max",
            "policies": [
                {"type": "Pods", "value": 1, "periodSeconds": min(down, 1800)},
                {"type": "Percent", "value": math.ceil(100 * scale.step_down), "periodSeconds": min(down, 1800)},
            ],
        },
    }


def objects(deployment: Deployment, group: EngineGroup) -> list[Json]:
    model, limits = group.model, group.limits
    if limits is None or not isinstance(model, ModelConfig) or model.autoscale is None:
        return []
    make = _keda if deployment.scaler == "keda" else _hpa
    return [make(deployment, group, model, model.autoscale, limits)]


def _target(deployment: Deployment) -> float:
    return float(deployment.options.queue_target)


def _keda(
    deployment: Deployment, group: EngineGroup, model: ModelConfig, scale: AutoscaleConfig, limits: Limits
) -> Json:
    matchers = f'model_name="{model.name}",namespace="{deployment.namespace}"'
    server = deployment.parameters.value("prometheus", "url", default=deployment.options.prometheus)

    def prometheus(name: str, query: str, threshold: float) -> Json:
        return {
            "type": "prometheus",
            "name": name,
            "metricType": "AverageValue",
            "metadata": {
                "serverAddress": server,
                "query": query,
                "threshold": f"{threshold / limits.share:.6g}",
                "activationThreshold": "0",
            },
        }

    shared = bool(deployment.config.admission.url)
    triggers = [
        prometheus("waiting", waiting(matchers, shared=shared), _target(deployment)),
        prometheus("running", running(matchers), concurrency(model, scale, group.device)),
    ]
    if not group.spot:
        triggers += [_cron(schedule, scale, limits.most) for schedule in scale.schedules]
    name = deployment.group_name(group)
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": deployment.metadata(name, engines.labels(deployment, group)),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
            "minReplicaCount": deployment.parameters.value("engines", group.label, "min", default=limits.least),
            "maxReplicaCount": deployment.parameters.value("engines", group.label, "max", default=limits.most),
            "pollingInterval": 5 if limits.least == 0 else 15,
            "cooldownPeriod": math.ceil(scale.idle_s),
            # While Prometheus cannot be asked, nothing is taken away.
            "fallback": {
                "failureThreshold": 3,
                "replicas": max(limits.least, min(1, limits.most)),
                "behavior": "currentReplicasIfHigher",
            },
            "advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior(scale)}},
            "triggers": triggers,
        },
    }


def _cron(schedule: ScheduleConfig, scale: AutoscaleConfig, most: int) -> Json:
    """A known busy time, one cold start early."""
    early = math.ceil((scale.cold_start_s or 0) / 60)
    begin = _minutes(schedule.start) - early
    end = _minutes(schedule.end) + (1440 if _minutes(schedule.end) <= _minutes(schedule.start) else 0)
    return {
        "type": "cron",
        "metadata": {
            "timezone": schedule.timezone,
            "start": _cron_time(begin, schedule),
            "end": _cron_time(end, schedule),
            "desiredReplicas": str(min(schedule.min, most)),
        },
    }


def _minutes(text: str) -> int:
    hours, minutes = text.split(":")
    return int(hours) * 60 + int(minutes)


def _cron_time(minutes: int, schedule: ScheduleConfig) -> str:
    """A time of the days of a schedule; beyond midnight, of the day before or after."""
    shift, minutes = divmod(minutes, 1440)
    days = sorted({(DAYS.index(day) + 1 + shift) % 7 for day in schedule.days})
    return f"{minutes % 60} {minutes // 60} * * {','.join(map(str, days)) or '*'}"


def _hpa(
    deployment: Deployment, group: EngineGroup, model: ModelConfig, scale: AutoscaleConfig, limits: Limits
) -> Json:
    def external(name: str, target: float) -> Json:
        metric = {"name": name, "selector": {"matchLabels": {"model_name": model.name}}}
        quantity = f"{round(1000 * target / limits.share)}m"
        return {
            "type": "External",
            "external": {"metric": metric, "target": {"type": "AverageValue", "averageValue": quantity}},
        }

    name = deployment.group_name(group)
    least = max(limits.least, 1)
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": deployment.metadata(name, engines.labels(deployment, group)),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name},
            "minReplicas": deployment.parameters.value("engines", group.label, "min", default=least),
            "maxReplicas": deployment.parameters.value("engines", group.label, "max", default=limits.most),
            "metrics": [
                external(WAITING, _target(deployment)),
                external(RUNNING, concurrency(model, scale, group.device)),
            ],
            "behavior": behavior(scale),
        },
    }


def adapter_rules(deployment: Deployment) -> Json:
    """Values for the chart of prometheus-adapter, which gives the autoscaler its metrics."""
    shared = bool(deployment.config.admission.url)

    def rule(name: str, query: str) -> Json:
        return {
            "seriesQuery": 'penstock_parked_requests{namespace!="",model_name!=""}',
            "resources": {"overrides": {"namespace": {"resource": "namespace"}}},
            "name": {"as": name},
            "metricsQuery": query,
        }

    matchers = "<<.LabelMatchers>>"
    return {
        "rules": {
            "external": [
                rule(WAITING, waiting(matchers, "model_name", shared=shared)),
                rule(RUNNING, running(matchers, "model_name")),
            ]
        }
    }
