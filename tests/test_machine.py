"""What a container allows, read from trees of files as the system shows them, and from a real control group."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.interpreter import python
from penstock.machine import CORES, usable_cores, usable_memory

GIB = 1 << 30
V1_UNLIMITED = 9223372036854771712
MOUNTS = {
    "v2": "35 30 0:29 {top} /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate",
    "v1": "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
}
GROUPS = {"v2": "0::{path}\n", "v1": "9:name=systemd:/\n4:memory:{path}\n2:cpu,cpuacct:{path}\n0::/\n"}


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(16)), raising=False)
    monkeypatch.delenv(CORES, raising=False)


def machine(root: Path, version: str, path: str = "/", top: str = "/") -> None:
    """64 GiB, of which 40 are free. `path`: of the process's group; `top`: where what is mounted begins."""
    here = root / "proc/self"
    here.mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {40 << 20} kB\n")
    (here / "cgroup").write_text(GROUPS[version].format(path=path))
    (here / "mountinfo").write_text(MOUNTS[version].format(top=top) + "\n")


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_groups_it_is_all_of_the_machine(tmp_path: Path) -> None:
    machine(tmp_path, "v2")
    assert usable_cores(tmp_path) == 16
    assert usable_memory(tmp_path) == (64 * GIB, 40 * GIB)
    assert usable_cores(tmp_path / "nowhere") == 16
    total, available = usable_memory(tmp_path / "nowhere")
    assert 0 < available < total


@pytest.mark.parametrize(
    "quota, cores",
    [("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("max 100000", 16), ("6400000 100000", 16)],
)
def test_cores_of_a_container(tmp_path: Path, quota: str, cores: int) -> None:
    machine(tmp_path / "2", "v2")
    write(tmp_path / "2/sys/fs/cgroup", cpu__max=quota)
    assert usable_cores(tmp_path / "2") == cores
    machine(tmp_path / "1", "v1")
    allowed, period = quota.replace("max", "-1").split()
    write(tmp_path / "1/sys/fs/cgroup/cpu,cpuacct", cpu__cfs_quota_us=allowed, cpu__cfs_period_us=period)
    assert usable_cores(tmp_path / "1") == cores


@pytest.mark.parametrize(("asked", "cores"), [("3", 3), ("0", 4), ("", 4), ("64", 4)])
def test_cores_that_a_pod_has_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, cores: int
) -> None:
    machine(tmp_path, "v2")
    write(tmp_path / "sys/fs/cgroup", cpu__max="400000 100000")
    monkeypatch.setenv(CORES, asked)
    assert usable_cores(tmp_path) == cores


def test_memory_of_a_container(tmp_path: Path) -> None:
    """What files are cached in counts as free: the system takes it back."""
    stat = f"anon {GIB}\nfile {3 * GIB}\ninactive_file {2 * GIB}\nactive_file {GIB // 2}\nslab_reclaimable {GIB // 4}"
    machine(tmp_path / "2", "v2")
    write(tmp_path / "2/sys/fs/cgroup", memory__max=8 * GIB, memory__current=5 * GIB, memory__stat=stat)
    assert usable_memory(tmp_path / "2") == (8 * GIB, 8 * GIB - 5 * GIB + 11 * GIB // 4)
    stat = f"cache {GIB}\ninactive_file 0\nactive_file 0\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}"
    machine(tmp_path / "1", "v1")
    of_memory = tmp_path / "1/sys/fs/cgroup/memory"
    write(of_memory, memory__limit_in_bytes=8 * GIB, memory__usage_in_bytes=5 * GIB, memory__stat=stat)
    assert usable_memory(tmp_path / "1") == (8 * GIB, 5 * GIB)
    write(of_memory, memory__limit_in_bytes=V1_UNLIMITED)
    assert usable_memory(tmp_path / "1") == (64 * GIB, 40 * GIB)


def test_a_group_that_is_full_has_nothing_left(tmp_path: Path) -> None:
    machine(tmp_path, "v2")
    write(tmp_path / "sys/fs/cgroup", memory__max=GIB, memory__current=2 * GIB)
    assert usable_memory(tmp_path) == (GIB, 0)


def test_the_narrowest_of_all_groups_above_counts(tmp_path: Path) -> None:
    machine(tmp_path, "v2", path="/pods/one/server")
    top = tmp_path / "sys/fs/cgroup"
    write(top / "pods", cpu__max="800000 100000", memory__max=16 * GIB, memory__current=15 * GIB)
    write(top / "pods/one", cpu__max="200000 100000", memory__max=32 * GIB, memory__current=GIB)
    write(top / "pods/one/server", cpu__max="max 100000", memory__max="max", memory__current=GIB)
    write(top / "pods/two", cpu__max="100000 100000", memory__max=GIB)
    assert usable_cores(tmp_path) == 2
    assert usable_memory(tmp_path) == (16 * GIB, GIB)


@pytest.mark.parametrize("path, top", [("/docker/ab", "/docker/ab"), ("/", "/docker/ab"), ("/../elsewhere", "/")])
def test_what_is_mounted_is_the_group_of_a_container(tmp_path: Path, path: str, top: str) -> None:
    machine(tmp_path, "v1", path, top)
    write(tmp_path / "sys/fs/cgroup/memory", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=GIB)
    assert usable_memory(tmp_path) == (2 * GIB, GIB)


@pytest.fixture
def group() -> Iterator[tuple[Path, Path]]:
    """A control group of this machine, as root may make one: its list of processes, and its limit of memory."""
    name, top = f"penstock-test-{os.getpid()}", Path("/sys/fs/cgroup")
    within = usable_groups(top)
    folder = within / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    limit = next((file for file in ("memory.max", "memory.limit_in_bytes") if (folder / file).exists()), None)
    try:
        if limit is None:
            pytest.skip("the memory of control groups is not limited here")
        if subprocess.run(["sh", "-c", f"echo $$ > {folder}/cgroup.procs"], capture_output=True).returncode:
            pytest.skip("no process may be moved into a control group here")
        yield folder / "cgroup.procs", folder / limit
    finally:
        folder.rmdir()


def usable_groups(top: Path) -> Path:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return (top / "memory" / path.lstrip("/")).parent
    return top


def test_a_real_group(group: tuple[Path, Path]) -> None:
    processes, limit = group
    limit.write_text(str(GIB))
    code = "from penstock.machine import usable_memory; print(*usable_memory())"
    joined = ["sh", "-c", f'echo $$ > {processes} && exec "$@"', "sh", *python("-c", code)]
    total, available = map(int, subprocess.check_output(joined, text=True).split())
    assert total == GIB and GIB // 2 < available < GIB
