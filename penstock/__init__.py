"""Penstock serves large language models: gateway, router and inference engine in one program."""

__version__ = "0.1.0"
