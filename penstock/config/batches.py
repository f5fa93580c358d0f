"""Settings of files and batches."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Files, and the batches of requests in them."""

    lines_at_once: int = setting(
        8, doc="Requests of batches that this gateway runs at one time; 0: it leaves batches to others.", least=0
    )
    most_lines: int = setting(50_000, doc="Most requests in one batch.", least=1)
    file_limit: int = setting(64 * 2**20, doc="Largest file.", least=1024, size=True)
    tenant_limit: int = setting(2**30, doc="Most bytes in the files of a tenant.", least=1024, size=True)
    keep_files_s: float = setting(30 * 86400.0, doc="Seconds after which a file is forgotten.", least=1)
    time_limit_s: float | None = setting(
        600.0, doc="Seconds one request of a batch may generate; null for no limit.", least=0.1
    )
