"""A Kafka broker in a process of its own: librdkafka's mock cluster, which speaks the wire protocol to any client.

    python -m tests.log_pipeline.broker TOPIC=PARTITIONS ...

It prints its address and then obeys lines on standard input: `down` (connections are cut, new ones refused), `up`. What
it holds is in memory, so it is never restarted; at most 5 MB per partition.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import confluent_kafka

from tests.parts import ROOT

BROKERS = 1


def main(topics: list[str]) -> None:
    folder = Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs"
    library = ctypes.CDLL(str(next(folder.glob("librdkafka*.so*"))))
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for name, result, arguments in (
        ("conf_new", pointer, []),
        ("new", pointer, [number, pointer, ctypes.c_char_p, ctypes.c_size_t]),
        ("mock_cluster_new", pointer, [pointer, number]),
        ("mock_cluster_bootstraps", ctypes.c_char_p, [pointer]),
        ("mock_topic_create", number, [pointer, ctypes.c_char_p, number, number]),
        ("mock_broker_set_down", number, [pointer, ctypes.c_int32]),
        ("mock_broker_set_up", number, [pointer, ctypes.c_int32]),
        ("mock_group_initial_rebalance_delay_ms", None, [pointer, ctypes.c_int32]),
    ):
        function = getattr(library, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
    handle = library.rd_kafka_new(0, library.rd_kafka_conf_new(), ctypes.create_string_buffer(512), 512)
    cluster = library.rd_kafka_mock_cluster_new(handle, BROKERS)
    library.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 500)
    for topic in topics:
        name, _, partitions = topic.partition("=")
        assert library.rd_kafka_mock_topic_create(cluster, name.encode(), int(partitions), 1) == 0
    print(library.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
    for line in sys.stdin:
        change = {"down": library.rd_kafka_mock_broker_set_down, "up": library.rd_kafka_mock_broker_set_up}
        print(change[line.strip()](cluster, 1), flush=True)


class Broker:
    """A running one."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._said()

    def url(self, topic: str, **options: object) -> str:
        query = "&".join(f"{name.replace('_', '.')}={value}" for name, value in options.items())
        return f"kafka://{self.address}/{topic}" + (f"?{query}" if query else "")

    def down(self) -> None:
        self._tell("down")

    def up(self) -> None:
        self._tell("up")

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._said() == "0"

    def _said(self) -> str:
        out: IO[str] | None = self._process.stdout
        assert out is not None
        return out.readline().strip()


@contextmanager
def broker(**topics: int) -> Iterator[Broker]:
    """With topics of so many partitions; others get four when they are first used."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.log_pipeline.broker", *(f"{name}={count}" for name, count in topics.items())],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
    )  # fmt: skip
    try:
        yield Broker(process)
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    main(sys.argv[1:])
