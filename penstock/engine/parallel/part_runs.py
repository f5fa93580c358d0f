"""A rank's part of every block, or state, where it has the tensors of its layers in another order than a whole one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.engine.kv.block_part import BlockPart, Span, TensorPart


@dataclass(frozen=True, slots=True)
class Run:
    """Layers that follow each other both in a rank's own tensor and in a whole one."""

    whole: int
    """Which tensor of a whole block."""
    own: int
    """Which of the rank's own."""
    bytes: Span
    """Where they are in the rank's own."""
    part: TensorPart


@dataclass(frozen=True, slots=True)
class PartInRuns(BlockPart):
    """See `BlockPart`. A rank may have the kinds of its layers in another order than the whole model."""

    runs: tuple[Run, ...] = ()
    own_bytes: tuple[int, ...] = ()

    @property
    def gives(self) -> bool:
        return any(run.part.gives for run in self.runs)

    def take(self, whole: list[memoryview], pieces: list[memoryview]) -> None:
        for run in self.runs:
            run.part.take(whole[run.whole], pieces[run.own][slice(*run.bytes)])

    def put(self, pieces: list[memoryview] | list[bytes], whole: list[memoryview]) -> None:  # type: ignore[override]
        for run in self.runs:
            if run.part.gives:
                run.part.put(pieces[run.own][slice(*run.bytes)], whole[run.whole])

    def cut(self, whole: list[memoryview]) -> list[bytes]:
        pieces = [bytearray(size) for size in self.own_bytes]
        self.take(whole, [memoryview(piece) for piece in pieces])
        return [bytes(piece) for piece in pieces]


def with_rows(part: PartInRuns, rows: TensorPart) -> PartInRuns:
    """And what a drafter reads, in a tensor behind the others; `rows`: empty where that is not here."""
    run = Run(len(part.tensors), len(part.own_bytes), (0, rows.own_bytes), rows)
    runs, own_bytes = (
        (part.runs, part.own_bytes) if rows.empty else ((*part.runs, run), (*part.own_bytes, rows.own_bytes))
    )
    return PartInRuns((*part.tensors, rows), runs, own_bytes)


def joined(runs: list[Run]) -> tuple[Run, ...]:
    """With as few copies as possible."""
    found: list[Run] = []
    for run in sorted(runs, key=lambda run: (run.own, run.bytes)):
        last = found[-1] if found else None
        if (
            last is not None
            and (last.own, last.whole, last.part.units, last.part.gives)
            == (run.own, run.whole, run.part.units, run.part.gives)
            and (last.bytes[1], last.part.layers[1]) == (run.bytes[0], run.part.layers[0])
        ):
            part = replace(last.part, layers=(last.part.layers[0], run.part.layers[1]))
            found[-1] = replace(last, bytes=(last.bytes[0], run.bytes[1]), part=part)
        else:
            found.append(run)
    return tuple(found)
