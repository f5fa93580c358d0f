from tests.gateway.conftest import serving, text

__all__ = ["serving", "text"]
