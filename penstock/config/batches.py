"""Settings of files and batches."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class BatchesConfig:
    """Uploaded files, and batches of the requests in them."""

    lines_at_once: int = setting(
        8, doc="Batch requests that this gateway runs in parallel; 0: it runs no batches.", least=0
    )
    most_lines: int = setting(50_000, doc="Maximum number of requests in one batch.", least=1)
    file_limit: int = setting(64 * 2**20, doc="Maximum size of a file that is sent whole.", least=1024, size=True)
    upload_limit: int = setting(
        512 * 2**20, doc="Maximum size of a file that is sent in parts (`/v1/uploads`).", least=1024, size=True
    )
    tenant_limit: int = setting(
        2**30, doc="Maximum size of all files of a tenant, with its open uploads.", least=1024, size=True
    )
    keep_files_s: float = setting(30 * 86400.0, doc="Seconds after which a file is deleted.", least=1)
    time_limit_s: float | None = setting(
        600.0, doc="Time limit of one batch request, in seconds; null: none.", least=0.1
    )
