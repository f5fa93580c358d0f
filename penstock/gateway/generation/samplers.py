"""`samplers`, llama.cpp's list of the filters that take part: those that are not in it are switched off. Their order
here is fixed, so the parameter is always named among those that are not followed."""

from __future__ import annotations

from typing import Any

from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.request_decoder import ignore_advice
from penstock.gateway.generation.schemas import TokenDetails
from penstock.protocol.errors import InvalidRequest

_OFF: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
"""What each filter reads, and the values with which it does nothing."""
_WITHOUT_EFFECT = ("dry", "top_n_sigma", "xtc", "infill", "adaptive_p")
"""Filters that are not there; their own parameters are refused where they ask for something."""
NAMES = ("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature")
"""llama.cpp's usual order."""
HERE = ("penalties", "typ_p", "temperature", "top_k", "top_p", "min_p")
"""The filters of this server, in their order."""
_OTHERWISE = {
    "top-k": "top_k",
    "top-p": "top_p",
    "nucleus": "top_p",
    "typical_p": "typ_p",
    "typical-p": "typ_p",
    "typical": "typ_p",
    "typ-p": "typ_p",
    "typ": "typ_p",
    "min-p": "min_p",
    "temp": "temperature",
    "top-n-sigma": "top_n_sigma",
}
_LETTERS = dict(zip("edskypmxtia", (*NAMES, "infill", "adaptive_p"), strict=True))


def choose_samplers(exchange: Exchange, request: TokenDetails) -> None:
    """Switch off what `samplers` does not name."""
    given = request.samplers
    if given is None:
        return
    names = [_LETTERS.get(letter, letter) for letter in given] if isinstance(given, str) else given
    named = {_OTHERWISE.get(name, name) for name in names}
    for name in sorted(named):
        if name not in _OFF and name not in _WITHOUT_EFFECT:
            raise InvalidRequest(
                f"`samplers` names `{name[:64]}`; there are {', '.join((*_OFF, *_WITHOUT_EFFECT))}.", param="samplers"
            )
    off: dict[str, Any] = {}
    for name, values in _OFF.items():
        if name not in named:
            off |= values
    for field, value in off.items():
        setattr(request, field, value)
    request.samplers = None
    ignore_advice(exchange, "samplers")
