"""Pods as processes of this machine: the very commands, variables, files and probes of the manifests.

A pod gets a folder for each of its volumes and an address of its own (127.0.1.N); paths and addresses in commands and
variables are replaced by these, and nothing else is. What a kubelet does with probes and signals, the tests do.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from penstock.fleet.kubernetes import Deployment
from penstock.fleet.kubernetes.manifests import objects
from tests.ports import free_port


@dataclass
class Pod:
    """One pod, with its first container as a process."""

    name: str
    spec: dict[str, Any]
    folder: Path
    address: str
    http: int
    cluster: Cluster
    process: subprocess.Popen[bytes] | None = None

    @property
    def container(self) -> dict[str, Any]:
        found: dict[str, Any] = self.spec["containers"][0]
        return found

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.http}"

    def here(self, text: str) -> str:
        """What stands in the manifest, on this machine."""
        for mount in sorted(self.container["volumeMounts"], key=lambda one: -len(one["mountPath"])):
            if mount["name"] not in ("tmp", "shm"):
                text = text.replace(mount["mountPath"], str(self.folder / mount["mountPath"].strip("/")))
        for name, pod in self.cluster.pods.items():
            group = name.rpartition("-")[0]
            text = text.replace(f"{name}.{group}.penstock.svc", pod.address)
        return text.replace("0.0.0.0", self.address).replace("127.0.0.1:5555", f"{self.address}:5555")

    def environment(self, container: dict[str, Any]) -> dict[str, str]:
        fields = {"metadata.name": self.name, "status.podIP": self.address}
        found: dict[str, str] = {}
        for entry in container["env"]:
            source = entry.get("valueFrom", {})
            if "secretKeyRef" in source:
                value = self.cluster.secret.get(source["secretKeyRef"]["key"])
                if value is None:
                    assert source["secretKeyRef"].get("optional"), f"the Secret lacks {entry['name']}"
                    continue
            elif "resourceFieldRef" in source:
                kind, _, resource = source["resourceFieldRef"]["resource"].partition(".")
                value = str(math.ceil(float(container["resources"][kind][resource])))
            elif "fieldRef" in source:
                value = fields.get(source["fieldRef"]["fieldPath"], "")
            else:
                value = self.here(entry["value"])
            for name, known in found.items():
                value = value.replace(f"$({name})", known)
            found[entry["name"]] = value
        # The models and kernels of this machine instead of a download and a compiler.
        found["PENSTOCK_CACHE"] = str(Path.home() / ".cache/penstock")
        found["XDG_CACHE_HOME"] = str(Path.home() / ".cache")
        return found

    def command(self, arguments: list[str]) -> list[str]:
        words = [self.here(word) for word in arguments]
        if "--port" in words:
            words[words.index("--port") + 1] = str(self.http)
        return [sys.executable, "-m", "penstock", *words]

    def run(self, container: dict[str, Any], arguments: list[str]) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self.environment(container)}
        return subprocess.run(self.command(arguments), env=environment, capture_output=True, text=True, timeout=120)

    def start(self) -> None:
        for container in self.spec.get("initContainers", []):
            done = self.run(container, container["args"])
            assert done.returncode == 0, done.stderr
        environment = {**os.environ, **self.environment(self.container), "OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("wb") as log:
            command = self.command(self.container["args"])
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def probe(self, name: str) -> bool:
        """What a kubelet would see."""
        probe = self.container[name]
        if "exec" in probe:
            return self.run(self.container, probe["exec"]["command"][1:]).returncode == 0
        try:
            path = probe["httpGet"]["path"]
            return httpx.get(f"{self.url}{path}", timeout=probe["timeoutSeconds"]).status_code == 200
        except httpx.HTTPError:
            return False

    def until(self, probe: str, within_s: float = 240.0) -> None:
        deadline = time.monotonic() + within_s
        while not self.probe(probe):
            assert self.process is not None and self.process.poll() is None, self.log
            assert time.monotonic() < deadline, f"{self.name}: {probe}: {self.log}"
            time.sleep(0.3)

    def terminate(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)

    def ended(self) -> int:
        """Its exit status; a kubelet would kill it when its time is over."""
        assert self.process is not None
        return self.process.wait(self.spec["terminationGracePeriodSeconds"])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()[-3000:]


@dataclass
class Cluster:
    """The pods of a deployment."""

    folder: Path
    secret: dict[str, str]
    pods: dict[str, Pod] = field(default_factory=dict)

    def add(self, deployed: Deployment, workload: str, count: int) -> list[Pod]:
        """Pods of a workload, not yet started."""
        (found,) = [
            thing
            for thing in objects(deployed)
            if thing["metadata"]["name"] == workload and "template" in thing.get("spec", {})
        ]
        added = []
        for index in range(count):
            name = f"{workload}-{index}"
            folder = self.folder / name
            address = f"127.0.1.{len(self.pods) + 1}"
            pod = Pod(name, found["spec"]["template"]["spec"], folder, address, free_port(), self)
            (folder / "etc/penstock/secret").mkdir(parents=True)
            (folder / "var/lib/penstock").mkdir(parents=True)
            (folder / "etc/penstock/penstock.yaml").write_text(deployed.pods.text)
            (folder / "etc/penstock/secret/fleet-secret").write_text(self.secret["fleet-secret"])
            self.pods[name] = pod
            added.append(pod)
        return added

    def stop(self) -> None:
        for pod in self.pods.values():
            if pod.process is not None and pod.process.poll() is None:
                pod.process.kill()
                pod.process.wait()
