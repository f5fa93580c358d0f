"""Configuration: one YAML file, overridden by the environment, overridden by flags.

`Config` is frozen and complete: code that receives one never reads files or variables itself.
"""

from penstock.config.load import dump, load, load_resolved
from penstock.config.models import ModelConfig
from penstock.config.schema import Config, GenerationConfig, LoggingConfig, ServerConfig

__all__ = [
    "Config",
    "GenerationConfig",
    "LoggingConfig",
    "ModelConfig",
    "ServerConfig",
    "dump",
    "load",
    "load_resolved",
]
