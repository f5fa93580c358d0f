"""CUDA devices: Triton kernels and CUDA graphs.

Modules here import triton; only `select` imports them, when a CUDA device asks for it, so that everything else runs
where triton is not installed.
"""
