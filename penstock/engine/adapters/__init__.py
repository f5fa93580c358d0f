"""LoRA adapters: reading them, keeping many, applying several in one batch.

`spec` holds the plain values that cross process boundaries and imports no torch; everything else belongs to the engine.
"""
