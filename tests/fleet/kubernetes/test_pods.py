"""The pods of the manifests, started on this machine: they become ready, answer, drain, and no stream is lost."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.fleet.kubernetes import ClusterOptions, Deployment, scaler
from penstock.protocol.fleet_secret import generate
from penstock.routing.replicas import ReplicaSet
from penstock.testing.in_process_backend import InProcessBackend
from penstock.text import TextModel
from tests.deploy.prometheus import need_prometheus, scraping
from tests.engine_host.client import eventually
from tests.fleet.kubernetes.cases import deployment
from tests.fleet.kubernetes.local_pods import Cluster, Pod
from tests.gateway.conftest import Serving
from tests.scripted import ScriptedEngine
from tests.services import postgres_url, valkey

__all__ = ["postgres_url", "valkey"]

TOKENS = 80
TINY = 'model_name="tiny"'
CONFIGURATION = """
server: {drain_s: 120, drain_delay_s: 3}
models:
  - {source: smollm2-135m, replicas: 2, threads: 1, max_running: 8, kv_memory: 64MiB, max_model_len: 1024}
"""


@pytest.fixture
def cluster(tmp_path: Path, postgres_url: str) -> Iterator[Cluster]:
    running = Cluster(tmp_path, {"fleet-secret": generate(), "store-url": postgres_url})
    try:
        yield running
    finally:
        running.stop()


def first_key(cluster: Cluster, deployed: Deployment) -> str:
    """What the Job prints."""
    (pod,) = cluster.add(deployed, "penstock-first-key", 1)
    done = pod.run(pod.container, pod.container["args"])
    assert done.returncode == 0, done.stderr
    (key,) = re.findall(r"psk_\S+", done.stdout)
    return str(key)


def stream(pod: Pod, key: str, under_way: threading.Semaphore) -> int:
    """How many tokens came; anything but a whole answer is an error."""
    body: dict[str, Any] = {"model": "smollm2-135m", "prompt": "Once upon a time", "max_tokens": TOKENS}
    body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    tokens, chunks, ended = 0, 0, False
    with httpx.stream("POST", f"{pod.url}/v1/completions", json=body, headers=headers, timeout=300) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                chunks += 1
                if chunks == 3:
                    under_way.release()
            ended = ended or line == "data: [DONE]"
    assert ended
    return tokens


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_pods_by_dns_names_start_probe_drain_and_lose_no_stream(cluster: Cluster, tmp_path: Path) -> None:
    deployed = deployment(CONFIGURATION, tmp_path, ClusterOptions())
    assert not deployed.redis
    key = first_key(cluster, deployed)
    engines = cluster.add(deployed, "penstock-smollm2-135m", 2)
    gateways = cluster.add(deployed, "penstock-gateway", 2)
    assert not engines[0].probe("startupProbe"), "nothing listens yet"
    for pod in (*engines, *gateways):
        pod.start()
    for pod in (*engines, *gateways):
        pod.until("startupProbe")
        pod.until("readinessProbe")
        assert pod.probe("livenessProbe")

    def together(doomed: Pod, others: list[Pod]) -> None:
        """Streams through all gateways that stay, and a pod that stops meanwhile."""
        under_way = threading.Semaphore(0)
        with ThreadPoolExecutor(6) as pool:
            running = [pool.submit(stream, others[index % len(others)], key, under_way) for index in range(6)]
            for _ in running:
                assert under_way.acquire(timeout=120)
            doomed.terminate()
            assert [one.result() for one in running] == [TOKENS] * 6
        assert doomed.ended() == 0, doomed.log

    # An engine's pod is evicted: it finishes what it has, or the other one does.
    together(engines[1], gateways)
    assert not engines[1].probe("livenessProbe")
    # A gateway's pod is replaced under its own streams; for a while it still takes requests that a balancer sends.
    under_way = threading.Semaphore(0)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(stream, gateways[1], key, under_way) for _ in range(3)]
        for _ in running:
            assert under_way.acquire(timeout=120)
        gateways[1].terminate()
        late = pool.submit(stream, gateways[1], key, under_way)
        assert [one.result() for one in (*running, late)] == [TOKENS] * 4
    assert gateways[1].ended() == 0, gateways[1].log
    assert gateways[0].probe("readinessProbe")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_held_request_is_seen_and_answered_by_the_pod_that_then_starts(
    cluster: Cluster, tmp_path: Path, valkey: Any
) -> None:
    scale = "autoscale: {min: 0, max: 2, hold_s: 600}"
    text = CONFIGURATION.replace("replicas: 2", scale).replace("drain_delay_s: 3", "drain_delay_s: 0.5")
    deployed = deployment(text, tmp_path, ClusterOptions())
    assert deployed.redis
    cluster.secret["fleet-url"] = f"redis://127.0.0.1:{valkey.port}"
    key = first_key(cluster, deployed)
    (engine,) = cluster.add(deployed, "penstock-smollm2-135m", 1)
    (gateway,) = cluster.add(deployed, "penstock-gateway", 1)
    gateway.start()
    gateway.until("startupProbe")
    gateway.until("readinessProbe")  # a model that sleeps is no reason to send nobody
    headers = {"authorization": f"Bearer {key}"}
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(stream, gateway, key, threading.Semaphore(0))
        held = 'penstock_held_requests{model_name="smollm2-135m"} 1'
        assert eventually(lambda: held in httpx.get(f"{gateway.url}/metrics", headers=headers, timeout=60).text, 120)
        engine.start()  # as KEDA would, on that metric
        assert asked.result() == TOKENS, gateway.log
    engine.until("readinessProbe")
    engine.terminate()
    assert engine.ended() == 0, engine.log
    gateway.terminate()
    assert gateway.ended() == 0, gateway.log


@pytest.mark.slow
@need_prometheus
async def test_the_queries_count_the_whole_queue(serving: Serving, text: TextModel, tmp_path: Path) -> None:
    engine = ScriptedEngine(text)
    engine.hold = True
    replicas = ReplicaSet("tiny", [InProcessBackend(engine, name="0")])  # as in a pod
    async with serving(engine, backend=replicas) as gateway, scraping(gateway.port, tmp_path) as prometheus:
        asked = [asyncio.create_task(gateway.chat()) for _ in range(5)]
        try:
            for shared in (False, True):
                for by in ("", "model_name"):
                    query = scaler.waiting(TINY, by, shared=shared)
                    both = f"({query}) + ({scaler.running(TINY, by)})"
                    (found,) = await prometheus.until(f"({both}) == 5")
                    assert found["metric"] == ({"model_name": "tiny"} if by else {})
            (none,) = await prometheus.query(scaler.waiting('model_name="other"', shared=False))
            assert none["value"][1] == "0", "a model without engines has no series; its queue is empty"
        finally:
            engine.hold = False
            await asyncio.gather(*asked)
