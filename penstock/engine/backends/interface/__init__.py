"""The leaf of the backend boundary: `Ops`, the operations of a decoder, and what host and device exchange. All names
are imported from here; the modules inside divide them by kind.

There are three backends: `reference` (plain PyTorch, the definition the others are tested against), `cpu` (a native
library) and `cuda` (Triton kernels, CUDA graphs). `select` picks one. The rest of the engine never imports a backend
and never asks which one it runs on; it uses this package, the interface `Backend` (`backend`), and `select`.

Layout, the same everywhere:

* Tokens of all sequences in a step are packed along one axis of length T, sequence after sequence.
* Sequences with a single new token (decodes) come first: rows `0..num_decodes` of the batch.
* The KV cache of a layer is `k_cache, v_cache: [num_blocks, kv_heads, block_size, head_dim]`.
* Cached numbers may be scaled: `KVScales` says how.
* The slot of a token is `block * block_size + offset`; block 0 is reserved: padding is written there.
"""

from penstock.engine.backends.activation import (
    Activation,
    BoundedSilu,
    ClampedSilu,
    ClampedSwiglu,
    Clip,
    Pointwise,
    Xielu,
)
from penstock.engine.backends.interface.activations import ActivationOps
from penstock.engine.backends.interface.attention import (
    AttentionOps,
    HeadLayout,
    HeadScales,
    LatentAdditions,
    LatentLayout,
    LatentWeights,
    OverRanks,
)
from penstock.engine.backends.interface.batch import (
    AttentionBatch,
    Floats,
    Followers,
    HostBatch,
    Ints,
    StateBatch,
    StepShare,
    attended,
)
from penstock.engine.backends.interface.block_index import BlockIndex, BlockIndexLayout, BlockIndexOps
from penstock.engine.backends.interface.compression import (
    CompressionCache,
    CompressionLayout,
    CompressionOps,
    Entries,
    EntryIndex,
    PoolInputs,
    PoolState,
)
from penstock.engine.backends.interface.device import (
    CopyEvent,
    DeviceAccess,
    DeviceMemory,
    NativeLibrary,
    Staging,
    StepDefaults,
    StepLimits,
    TimedStep,
)
from penstock.engine.backends.interface.dtypes import (
    FP8,
    FP8_MAX,
    INT8,
    INT8_MAX,
    SCALE_DTYPE,
    KeySmoothing,
    KVScales,
    torch_dtype,
)
from penstock.engine.backends.interface.indexer import (
    Chosen,
    ChosenTokens,
    IndexLayout,
    IndexNorm,
    IndexOps,
)
from penstock.engine.backends.interface.links import Link, apply_links
from penstock.engine.backends.interface.operations import LinkedProducts, Ops
from penstock.engine.backends.interface.pooled_index import PooledIndexLayout, PooledIndexOps
from penstock.engine.backends.interface.recurrence import (
    DeltaLayout,
    DeltaWeights,
    MambaLayout,
    MambaWeights,
    RecurrentOps,
    ShortConvWeights,
)
from penstock.engine.backends.interface.sampling import SamplingOps
from penstock.engine.backends.interface.sparse_blocks import SparseBlockIndex, SparseBlockLayout, SparseBlockOps

__all__ = [
    "FP8",
    "FP8_MAX",
    "INT8",
    "INT8_MAX",
    "SCALE_DTYPE",
    "Activation",
    "ActivationOps",
    "AttentionBatch",
    "AttentionOps",
    "BlockIndex",
    "BlockIndexLayout",
    "BlockIndexOps",
    "BoundedSilu",
    "Chosen",
    "ChosenTokens",
    "ClampedSilu",
    "ClampedSwiglu",
    "Clip",
    "CompressionCache",
    "CompressionLayout",
    "CompressionOps",
    "CopyEvent",
    "DeltaLayout",
    "DeltaWeights",
    "DeviceAccess",
    "DeviceMemory",
    "Entries",
    "EntryIndex",
    "Floats",
    "Followers",
    "HeadLayout",
    "HeadScales",
    "HostBatch",
    "IndexLayout",
    "IndexNorm",
    "IndexOps",
    "Ints",
    "KVScales",
    "KeySmoothing",
    "LatentAdditions",
    "LatentLayout",
    "LatentWeights",
    "Link",
    "LinkedProducts",
    "MambaLayout",
    "MambaWeights",
    "NativeLibrary",
    "Ops",
    "OverRanks",
    "Pointwise",
    "PoolInputs",
    "PoolState",
    "PooledIndexLayout",
    "PooledIndexOps",
    "RecurrentOps",
    "SamplingOps",
    "ShortConvWeights",
    "SparseBlockIndex",
    "SparseBlockLayout",
    "SparseBlockOps",
    "Staging",
    "StateBatch",
    "StepDefaults",
    "StepLimits",
    "StepShare",
    "TimedStep",
    "Xielu",
    "apply_links",
    "attended",
    "torch_dtype",
]
