"""Former names of what is in `penstock.backends.remote`."""

from penstock.backends.remote.chunk import Chunk, ChunkChoice, ChunkUsage
from penstock.backends.remote.credentials import authorization
from penstock.backends.remote.server import RemoteServer as OpenAIServer
from penstock.backends.remote.upstream import Upstream

__all__ = ["Chunk", "ChunkChoice", "ChunkUsage", "OpenAIServer", "Upstream", "authorization"]
