"""Configurations and options that together use every object that can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.fleet.kubernetes import ClusterOptions, Deployment
from penstock.fleet.kubernetes.manifests import objects

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted(file for file in (ROOT / "examples").glob("*.yaml") if file.stem != "hybrid")
"""Of hybrid.yaml, the API is on this machine: it is refused until another one is named."""
EVERYTHING = ClusterOptions(
    service_monitor=True,
    priority_classes=True,
    inference_pool=True,
    objectives=True,
    route="infra/web",
    host="llm.example.com",
)
RICH = """
server: {drain_s: 45, admin_port: 8001}
store: {url: 'postgresql://penstock:hunter2@db.example.com:6432/penstock'}
counters: {url: 'redis://:swordfish@redis.example.com:6380'}
admission: {url: 'redis://redis.example.com:6379'}
telemetry: {otlp_endpoint: 'http://collector:4318', otlp_headers: [x-token=opensesame]}
models:
  - source: hf:meta-llama/Llama-3.1-8B-Instruct
    name: Llama.8B
    replicas: 4
    replica_devices: [cuda:0, cuda:1]
    replica_roles: [prefill, decode]
    adapters: [{name: support, source: s3://adapters/support}]
    disk_memory: 10GiB
    disk_path: /var/cache/blocks
  - source: hf:org/spot
    name: spot
    autoscale:
      {min: 2, max: 10, spot: 0.5, spot_base: 2, concurrency: 40, cold_start_s: 600,
       schedules: [{days: [mon, fri], start: "00:05", end: "24:00", min: 4, timezone: Europe/Berlin}]}
  - source: hf:org/large
    name: large
    tensor_parallel: 4
    pipeline_parallel: 3
    placement: {machines: [local, host-b, host-c], listen: 'tcp://127.0.0.1:7001'}
  - source: smollm2-135m
    name: small
    pools: [{name: chat, replicas: 2}, {name: Batch, max_running: 128, threads: 2}]
    pool_rules: [{pool: Batch, classes: [batch], spill: [chat]}]
    resources: {cpus: 2.5, memory: 3GiB, labels: [example.com/nvme=1]}
encoders: [{source: minilm, name: minilm}]
remotes: [{model: gpt, urls: ['https://api.example.com/v1'], key_env: UPSTREAM_KEY}]
"""


def deployment(text: str, folder: Path, options: ClusterOptions = EVERYTHING) -> Deployment:
    file = folder / "penstock.yaml"
    file.write_text(text)
    return Deployment.of(file, options)


def found(deployed: Deployment, kind: str, name: str) -> dict[str, Any]:
    (one,) = [thing for thing in objects(deployed) if (thing["kind"], thing["metadata"]["name"]) == (kind, name)]
    return one


def pod_specs(deployed: Deployment) -> list[dict[str, Any]]:
    return [thing["spec"]["template"]["spec"] for thing in objects(deployed) if "template" in thing["spec"] or {}]
