"""The process of a rank on a machine that has joined: an ordinary one that finds adapters by itself."""

from __future__ import annotations

from penstock.engine.parallel.rank import main
from penstock.sources.adapters import resolve_adapter

if __name__ == "__main__":
    main(resolve_adapter)
