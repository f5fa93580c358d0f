"""`penstock serve --cluster ray` on a simulated Ray cluster of several nodes (R-OPS-3)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests import parts
from tests.fleet.ray_addresses import ADDRESSES


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("drill", ["lost_node", "scaled", "crashed"])
def test_ray_cluster(drill: str, tmp_path: Path) -> None:
    """Ray takes addresses from the network interfaces, so it gets a namespace with a loopback interface of its own."""
    if shutil.which("unshare") is None or shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root, unshare and iproute2")
    python = parts.python("ray")
    addresses = " && ".join(f"ip addr add {address}/32 dev lo" for address in ADDRESSES)
    script = f"ip link set lo up && {addresses} && exec {python} -m tests.fleet.ray_drill {drill} {tmp_path}"
    (tmp_path / "model").mkdir()
    # A process namespace as well, so that nothing of Ray outlives the test.
    command = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script]
    env = {**os.environ, "PYTHONPATH": str(parts.ROOT)}
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=env, cwd=parts.ROOT, start_new_session=True
        )
        try:
            code = process.wait(1400)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert code == 0, log.read_text()[-8000:]
