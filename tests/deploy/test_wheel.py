"""The wheel: what is in it, and that it installs and serves where there is neither torch nor a compiler nor a clone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from penstock.engine.backends.cpu import build
from tests.deploy.conftest import bare
from tests.engine_host.client import eventually
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]


def test_it_is_for_any_python_and_has_kernels_and_console_inside(wheel: Path) -> None:
    assert re.fullmatch(r"penstock-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name), wheel.name
    assert wheel.stat().st_size < 12e6
    names = set(zipfile.ZipFile(wheel).namelist())
    assert f"penstock/engine/backends/cpu/prebuilt/{build._prebuilt_name()}" in names
    for name in ("vue.js", "quasar.js", "echarts/index.js", "fonts.css"):
        assert f"penstock/console/lib/{name}" in names
    tracked = subprocess.run(["git", "ls-files", "penstock"], cwd=ROOT, capture_output=True, text=True, check=True)
    missing = [name for name in tracked.stdout.split() if name not in names]
    assert not missing, missing
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_its_kernels_run_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "unpacked")
    code = "from penstock.engine.backends.select import native_status as s; print(s().available, s().detail)"
    environment = bare(
        PYTHONPATH=str(tmp_path / "unpacked"), PATH=str(tmp_path), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("True "), done
    assert not (tmp_path / "cache").exists(), "nothing was compiled"


@pytest.fixture(scope="module")
def gateway_only(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The `penstock` command of an environment with `penstock[gateway]`."""
    folder = tmp_path_factory.mktemp("gateway")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *CONSTRAINTS]
    subprocess.run([*install, f"penstock[gateway] @ {wheel.as_uri()}"], env=bare(), check=True)
    yield folder / "bin" / "penstock"
    shutil.rmtree(folder)


def test_a_gateway_without_torch_serves_an_engine_of_another_environment(
    gateway_only: Path, default_model: Path, tmp_path: Path
) -> None:
    environment = bare(PENSTOCK_STATE=str(tmp_path / "state"), COLUMNS="300")

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(gateway_only), *words], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
        )

    python = gateway_only.with_name("python")
    code = "import importlib.util as u; print(*[n for n in ('torch', 'usearch', 'nicegui') if u.find_spec(n)])"
    assert subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment).stdout == "\n"
    refused = run("serve")
    assert refused.returncode == 2 and "pip install 'penstock[engine]'" in refused.stderr, refused

    (tmp_path / "penstock.yaml").write_text(
        f"models: [{{name: tiny, source: {default_model}, kv_memory: 32MiB, max_model_len: 512, max_running: 4}}]\n"
    )
    endpoint, port = f"tcp://127.0.0.1:{free_port()}", free_port()
    config = ["-c", str(tmp_path / "penstock.yaml")]
    engine = [sys.executable, "-m", "penstock", "engine", "tiny", *config, "-e", endpoint]
    gateway = [str(gateway_only), "gateway", "-e", f"tiny={endpoint}", *config, "--port", str(port)]
    processes = [subprocess.Popen(engine), subprocess.Popen(gateway, env=environment, cwd=tmp_path)]
    url = f"http://127.0.0.1:{port}"
    try:
        assert eventually(lambda: _status(f"{url}/health/ready") == 200, 300)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0, answer.text
        assert httpx.get(f"{url}/console/lib/quasar.js").status_code == 200
        assert run("chat", "Hello", "--url", url, "--model", "tiny").returncode == 0
        assert run("top", "--once", "--url", url).returncode == 0
        assert run("plan", "llama-3-8b").returncode == 0
        doctor = run("doctor", *config)
        assert "can run gateways, but no engine" in doctor.stdout + doctor.stderr, doctor
        created = run("keys", "create", "--tenant", "ops", "--scope", "inference")
        assert created.returncode == 0, created
        for process in processes:
            process.terminate()
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _status(url: str) -> int:
    try:
        return httpx.get(url, timeout=180).status_code
    except httpx.HTTPError:
        return 0
