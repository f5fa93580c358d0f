"""The OCI image: built with buildah on a base made of Debian packages, and run with podman: an ordinary user, a
read-only root file system, a health check, and SIGTERM that lets requests finish.

Base, wheels and layers are kept beside the other parts (`tests/parts.py`), so that only the first run takes long.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests import parts
from tests.deploy.conftest import ROOT, bare
from tests.engine_host.client import eventually
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
TOOLS = ("buildah", "podman", "mmdebstrap")
BASE, IMAGE = "localhost/penstock-base:test", "localhost/penstock:test"
DEBIAN = "bookworm"
LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
"""Podman's own are higher than a machine may allow."""


@dataclass
class Store:
    """A container store of its own, and a runtime that works on this machine."""

    folder: Path
    runtime: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True)
        assert not check or done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done

    def podman(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.run("podman", "--runtime", self.runtime, "--cgroup-manager=cgroupfs", *words, check=check)

    def options(self, volume: Path, *more: str) -> list[str]:
        """Of a container as it should run in production: nothing writable but its volume and /tmp."""
        # The health check is asked by hand: podman runs it with systemd timers.
        return [
            "--network=host", "--no-healthcheck", *LIMITS, "--read-only", "--tmpfs=/tmp", "--cap-drop=ALL",
            "--security-opt=no-new-privileges", f"--volume={volume}:/var/lib/penstock", *more,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def store() -> Store:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and {', '.join(TOOLS)} (Debian: apt install buildah podman runc mmdebstrap)")
    folder = parts.home() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    # Paths of sockets have to be short.
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "/run/penstock-test-images"\n'
    )
    return Store(folder, environment=bare(CONTAINERS_STORAGE_CONF=str(folder / "storage.conf")))


def build(store: Store, wheel: Path, context: Path) -> None:
    base = store.folder / "base.tar"
    if not base.exists():
        packages = "--include=python3,python3-venv,ca-certificates"
        made = store.run("mmdebstrap", "--variant=minbase", packages, DEBIAN, f"{base}.part", check=False)
        if made.returncode:
            pytest.skip(f"no base can be made of Debian packages here: {made.stderr[-500:]}")
        Path(f"{base}.part").rename(base)
    if store.run("buildah", "inspect", BASE, check=False).returncode:
        name = store.run("buildah", "from", "scratch").stdout.strip()
        store.run("buildah", "add", name, str(base), "/")
        store.run("buildah", "commit", "--rm", name, BASE)
    wheels = store.folder / "wheels"
    download = [sys.executable, "-m", "pip", "download", "-q", "--dest", str(wheels)]
    store.run(*download, "-c", str(ROOT / "constraints.txt"), f"penstock[serve] @ {wheel.as_uri()}")
    (context / "dist").mkdir()
    shutil.copy(wheel, context / "dist")
    for name in ("constraints.txt", ".dockerignore", "deploy/image/Containerfile"):
        shutil.copy(ROOT / name, context)
    (context / "not-for-the-image").write_text("left out by .dockerignore")
    # Only wheels that were downloaded before: a build that reaches for anything else fails.
    arguments = {
        "BASE": BASE, "EXTRAS": "serve", "TORCH_INDEX": "file:///none", "PIP_ARGS": "--no-index --find-links /wheels",
    }  # fmt: skip
    store.run(
        "buildah", "bud", "--format=docker", "--isolation=chroot", "--layers", f"--volume={wheels}:/wheels:ro",
        "--file", str(context / "Containerfile"), "--target=cpu", f"--tag={IMAGE}",
        *(f"--build-arg={name}={value}" for name, value in arguments.items()), str(context),
    )  # fmt: skip


@pytest.fixture(scope="module")
def image(request: pytest.FixtureRequest, store: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Built here, or the one of the store that $PENSTOCK_IMAGE names."""
    image = os.environ.get("PENSTOCK_IMAGE", "")
    if not image:
        image = IMAGE
        build(store, request.getfixturevalue("wheel"), tmp_path_factory.mktemp("context"))
    for runtime in ("crun", "runc"):
        store.runtime = runtime
        tried = ["run", "--rm", "--network=host", "--no-healthcheck", *LIMITS, image, "--version"]
        if shutil.which(runtime) and (ran := store.podman(*tried, check=False)).returncode == 0:
            assert ran.stdout.startswith("penstock "), ran
            return image
    pytest.skip("podman can run no container on this machine, neither with crun nor with runc")


def test_its_definition_is_for_orchestrators(store: Store, image: str) -> None:
    (about,) = json.loads(store.podman("image", "inspect", image).stdout)
    config = about["Config"]
    assert config["Entrypoint"] == ["penstock"] and config["Cmd"] == ["serve", "--host", "0.0.0.0"]
    assert config["User"] == "10001:10001" and config["StopSignal"] == "SIGTERM"
    assert about["HealthCheck" if "HealthCheck" in about else "Healthcheck"]["Test"] == ["CMD", "penstock", "health"]
    assert "/var/lib/penstock" in config["Volumes"] and "8000/tcp" in config["ExposedPorts"]
    listed = store.podman("run", "--rm", "--network=host", "--no-healthcheck", *LIMITS, "--entrypoint=find",
                          image, "/", "-xdev", "-name", "*.whl", check=False)  # fmt: skip
    assert "penstock" not in listed.stdout, "the wheel stays in the stage that installs it"


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "volume"
    folder.mkdir()
    os.chown(folder, 10001, 10001)
    tmp_path.chmod(0o755)
    yield folder


def test_a_container_serves_as_an_ordinary_user_and_finishes_requests_on_sigterm(
    store: Store, image: str, default_model: Path, volume: Path, tmp_path: Path
) -> None:
    port = free_port()
    (tmp_path / "penstock.yaml").write_text(
        "models: [{name: tiny, source: /model.gguf, kv_memory: 64MiB, max_model_len: 2048, max_running: 4}]\n"
        f"server: {{host: 0.0.0.0, port: {port}, drain_s: 120}}\nencoders: []\n"
    )
    mounts = [
        f"--volume={tmp_path / 'penstock.yaml'}:/etc/penstock/penstock.yaml:ro",
        f"--volume={default_model}:/model.gguf:ro",
    ]
    options = store.options(volume, *mounts)
    refused = store.podman("run", "--rm", *options, image, "serve", check=False)
    assert refused.returncode == 2 and "penstock keys create" in refused.stderr, refused
    key = store.podman("run", "--rm", *options, image, "keys", "create", "--tenant", "t").stdout.split()[-1]
    name = store.podman("run", "--detach", *options, image, "serve").stdout.strip()
    try:
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            state = store.podman("inspect", "--format={{.State.Status}}", name).stdout.strip()
            assert state == "running", store.podman("logs", name, check=False)
            return store.podman("exec", name, "penstock", "health", "--url", url, check=False).returncode == 0

        assert eventually(healthy, 600), store.podman("logs", name, check=False)
        status = Path(f"/proc/{store.podman('inspect', '--format={{.State.Pid}}', name).stdout.strip()}/status")
        facts = dict(line.split(":", 1) for line in status.read_text().splitlines())
        assert facts["Uid"].split() == ["10001"] * 4 and facts["CapEff"].strip() == "0" * 16
        wrote = store.podman("exec", name, "touch", "/opt/penstock/here", "/etc/here", check=False)
        assert wrote.stderr.count("Read-only file system") == 2, wrote
        kernels = store.podman("exec", name, "penstock", "doctor", check=False).stdout
        assert "fallback" not in kernels, kernels

        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "stream": True}
        pieces: list[str] = []
        first = threading.Event()

        def stream() -> None:
            headers = {"authorization": f"Bearer {key}"}
            with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=300) as answer:
                for line in answer.iter_lines():
                    pieces.append(line)
                    first.set()

        reader = threading.Thread(target=stream)
        reader.start()
        assert first.wait(120)
        store.podman("stop", "--time=180", name)
        reader.join(60)
        assert pieces[-1] == "" and "data: [DONE]" in pieces, "the stream was finished before the server ended"
        assert store.podman("inspect", "--format={{.State.ExitCode}}", name).stdout.strip() == "0"
    finally:
        store.podman("rm", "--force", name, check=False)


def test_the_first_process_of_a_container_ends_on_sigterm_before_its_command_handles_it() -> None:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare")
    code = (
        "import time, penstock.cli, penstock.cli.app as module\n"
        "module.narrowed = lambda command: lambda: (print('up', flush=True), time.sleep(600))\n"
        "penstock.cli.main()"
    )
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None and outside.stdout.readline() == "up\n"
        (first,) = Path(f"/proc/{outside.pid}/task/{outside.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
        assert outside.wait(60) == 128 + signal.SIGTERM
