"""What one replica of a model reserves on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class ResourcesConfig:
    """Reserved for all ranks of one replica together, on one machine."""

    cpus: float | None = setting(
        None, doc="CPU cores; when not set, threads x ranks on CPU, one per rank on GPUs.", least=0.01, example="8"
    )
    gpus: float | None = setting(
        None, doc="GPUs; when not set, one per rank, or memory_share of one; 0 on CPU.", least=0, example="2"
    )
    memory: int | None = setting(
        None, doc="Host memory; when not set, none is reserved.", least=1, size=True, example="16GiB"
    )
    labels: tuple[str, ...] = setting(
        (), doc="Custom resources of the cluster that a machine must have, as NAME or NAME=AMOUNT.",
        example="[h200, nvme=1]",
    )  # fmt: skip

    @property
    def custom(self) -> dict[str, float]:
        """The amounts of custom resources; a name alone asks for a little, so that it only says where."""
        found = {}
        for label in self.labels:
            name, _, amount = label.partition("=")
            found[name] = float(amount or 0.001)
        return found

    def problems(self) -> list[str]:
        """Mistakes."""
        problems = []
        if self.gpus is not None and self.gpus > 1 and self.gpus != int(self.gpus):
            problems.append("gpus: more than one must be a whole number")
        for label in self.labels:
            name, equals, amount = label.partition("=")
            if not name or (equals and not _positive(amount)):
                problems.append(f"labels: {label!r} is not NAME or NAME=AMOUNT")
        return problems


def _positive(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
