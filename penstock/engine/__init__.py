"""The inference engine: token ids in, token ids out. It knows nothing of HTTP, JSON or text."""

import os

# torch's own threads look for work for a while after each parallel operation, on the cores that the pool needs;
# here they look only for a moment. Read when torch is loaded, which comes after this.
os.environ.setdefault("GOMP_SPINCOUNT", "300")
