"""The inference engine: token ids in, token ids out. It knows nothing of HTTP, JSON or text."""

import os

# torch's own threads look for work for a while after each parallel operation. With the engine's pool on the same cores
# that costs a third of a step, so they look only for a moment. Read when torch is loaded, which comes after this.
os.environ.setdefault("GOMP_SPINCOUNT", "300")
