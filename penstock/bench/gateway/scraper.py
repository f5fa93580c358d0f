"""The scraper of `penstock bench scrape`, a process of its own: one line of JSON per scrape, until it is ended.

    python -m penstock.bench.gateway.scraper PORT SECONDS

It keeps one bare connection, so that it costs the machine little.
"""

from __future__ import annotations

import http.client
import json
import sys
import time

ACCEPT = "application/openmetrics-text"


def scrape(port: int, every_s: float) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    due = time.monotonic()
    while True:
        begin = time.perf_counter()
        connection.request("GET", "/metrics", headers={"accept": ACCEPT})
        size = len(connection.getresponse().read())
        print(json.dumps({"ms": (time.perf_counter() - begin) * 1000, "bytes": size}), flush=True)
        due = max(due + every_s, time.monotonic() - every_s)
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    scrape(int(sys.argv[1]), float(sys.argv[2]))
