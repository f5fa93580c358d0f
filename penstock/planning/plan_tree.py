"""A plan as plain values: mappings, lists, numbers and strings, for JSON. In bytes, seconds and dollars."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from penstock.planning.candidate import Candidate
from penstock.planning.capacity import Steady
from penstock.planning.money import Bill
from penstock.planning.plan import ApiComparison, Plan
from penstock.planning.workload import Rate, Workload


def as_tree(plan: Plan) -> dict[str, Any]:
    shape = plan.shape
    return {
        "model": {
            "name": shape.name,
            "parameters": shape.parameters,
            "active_parameters": shape.active_parameters,
            "layers": shape.layers,
            "kv_bytes_per_token": shape.kv_bytes_per_token(2),
            "max_positions": shape.max_positions,
        },
        "context": plan.context,
        "workload": _workload(plan.workload),
        "slo": asdict(plan.slo),
        "autoscaled": plan.options.autoscaled,
        "best": _candidate(plan.best) if plan.best else None,
        "why_none": plan.why_none,
        "candidates": [_candidate(one) for one in plan.candidates],
        "rejected": [{"deployment": one.label, "kind": one.kind, "reason": one.reason} for one in plan.rejected],
        "concurrency": [{"context": length, "sequences": count} for length, count in plan.concurrency],
        "day": [asdict(hour) for hour in plan.day],
        "api": _api(plan.api) if plan.api else None,
        "sensitivity": [asdict(row) for row in plan.sensitivity],
        "assumptions": [asdict(one) for one in plan.assumptions],
    }


def _workload(work: Workload) -> dict[str, Any]:
    return {
        "users": work.users,
        "requests_per_user": work.requests_per_user,
        "requests_per_day": work.requests_per_day,
        "input_tokens": work.input_tokens,
        "prompt_tokens": work.prompt_tokens,
        "output_tokens": work.output_tokens,
        "turns": work.turns,
        "shared_prefix": work.shared_prefix,
        "cache_hit_rate": work.hit_rate,
        "peak_factor": work.peak_factor,
        "curve": {"name": work.curve.name, "hours": list(work.curve.hours)},
        "average": _rate(work.average),
        "peak": _rate(work.peak),
    }


def _rate(rate: Rate) -> dict[str, float]:
    return {
        "requests_per_s": rate.requests,
        "input_tokens_per_s": rate.input_tokens,
        "cached_tokens_per_s": rate.cached_tokens,
        "output_tokens_per_s": rate.output_tokens,
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    made, memory, fleet = one.deployment, one.memory, one.fleet
    return {
        "deployment": one.label,
        "device": made.device.name,
        "tensor_parallel": made.tensor_parallel,
        "pipeline_parallel": made.pipeline_parallel,
        "weight_dtype": made.weights.name,
        "kv_dtype": made.kv_format,
        "devices_per_replica": made.devices,
        "memory": {
            "weight_bytes_per_device": memory.weights,
            "runtime_bytes_per_device": memory.runtime,
            "activation_bytes_per_device": memory.activations,
            "adapter_bytes_per_device": memory.adapters,
            "kv_bytes_per_device": memory.kv_room,
            "state_bytes_per_device": memory.states,
            "reserve_bytes_per_device": memory.reserve,
            "kv_tokens": memory.kv_tokens,
            "host_tokens": memory.host_tokens,
        },
        "most": _steady(one.most),
        "at_peak": _steady(one.steady),
        "replicas": fleet.replicas,
        "devices": fleet.devices,
        "nodes": fleet.nodes,
        "replicas_by_hour": list(fleet.by_hour),
        "utilisation": fleet.utilisation,
        "autoscaled_utilisation": fleet.autoscaled_utilisation,
        "static": _bill(one.static),
        "autoscaled": _bill(one.autoscaled),
        "monthly": one.monthly,
        "prefill_share": one.prefill_share,
        "dollars_per_million_tokens": asdict(one.tokens),
        "calibration": one.calibration.title,
    }


def _steady(state: Steady) -> dict[str, Any]:
    """A time without end is null: JSON has no infinity."""
    values = asdict(state)
    return {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in values.items()}


def _bill(bill: Bill) -> dict[str, Any]:
    return {
        "gpus": bill.gpus.dollars,
        "gpu_hours": {
            "on_demand": bill.gpus.on_demand_hours,
            "reserved": bill.gpus.reserved_hours,
            "spot": bill.gpus.spot_hours,
        },
        "operations": bill.operations,
        "egress": bill.egress,
        "storage": bill.storage,
        "total": bill.total,
    }


def _api(api: ApiComparison) -> dict[str, Any]:
    return {
        "price": asdict(api.price),
        "dollars_per_request": api.per_request,
        "monthly": api.monthly,
        "break_even_requests_per_day": api.break_even,
        "autoscaled_break_even_requests_per_day": api.autoscaled_break_even,
        "curve": [asdict(point) for point in api.curve],
    }
