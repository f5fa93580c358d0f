"""Finding, fetching and reading models: sources, the model cache, safetensors and GGUF checkpoints.

`sources` and `gguf` need no torch (the gateway uses them); `checkpoint` and `random_checkpoint` do.
"""
