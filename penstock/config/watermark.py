"""Settings of watermarks in generated text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class WatermarkConfig:
    """A keyed watermark in sampled answers, which `penstock watermark detect` and /v1/watermark/detect find."""

    secret_file: str = setting(
        "", doc="File with the secret that every tenant's key is derived from (`penstock watermark secret FILE` writes "
        "one); empty: no watermarks. With several lines the first marks and all detect, so that it can be changed.",
        example="/etc/penstock/watermark.secret",
    )  # fmt: skip
    use: Literal["never", "asked", "default", "always"] = setting(
        "asked", doc="Which answers are marked, where tier, tenant and key say nothing: none; those of requests that "
        "ask for it; those of requests that do not decline; all (a request that cannot be marked is refused).",
    )  # fmt: skip
    threshold: float = setting(
        0.001, doc="Maximum p-value with which a detector says that a text is watermarked: the share of texts without "
        "the watermark for which it says so too.", least=1e-12, most=0.5,
    )  # fmt: skip
