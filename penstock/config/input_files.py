"""Settings of files that requests hand to models."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class InputFilesConfig:
    """Files that requests hand to models: by id, in the request, or by URL."""

    cache: int = setting(
        64 * 2**20, doc="Memory of a gateway process for texts of PDFs, so that one that many requests name is read "
        "once; a tenant may use half of it. 0: none.", least=0, size=True, example="64MiB",
    )  # fmt: skip
    url_hosts: tuple[str, ...] = setting(
        (), doc='Hosts that files may be fetched from by their URL; "*.example.org": those below a domain, "*": every '
        "public one. Empty: no file is fetched.", example='["docs.example.org", "*.example.com"]',
    )  # fmt: skip
    url_networks: tuple[str, ...] = setting(
        (),
        doc='Private networks that these hosts may be in, but not those of "*"; empty: public addresses only.',
        example="[10.1.0.0/16]",
    )
    url_plain_http: bool = setting(False, doc="Whether files may have http:// URLs, without TLS.")
    url_timeout_s: float = setting(
        15.0, doc="Time limit in seconds for fetching a file, with its redirects.", least=0.1, most=120
    )
