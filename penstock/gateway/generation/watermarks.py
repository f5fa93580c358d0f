"""Whether an answer is watermarked: what the request asks for, and what its key, tenant and tier say.

Invariant: an answer that must be marked is marked, or the request is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from penstock.config.watermark import WatermarkConfig
from penstock.engine.request import SamplingParams
from penstock.gateway.app.exchange import Exchange
from penstock.identity.allowance import Watermarking
from penstock.identity.watermark import WatermarkKeys
from penstock.protocol.errors import InvalidRequest

HEADER = b"x-penstock-watermark"
NO_CHOICE_TOP_P = 1e-9
Decision = Literal["no", "may", "must"]


class Watermarks:
    """The watermarks of one gateway."""

    def __init__(self, config: WatermarkConfig, of_tiers: Mapping[str, Watermarking | None]) -> None:
        """`of_tiers`: what tiers say, by name."""
        self._use = config.use
        self._of_tiers = of_tiers
        self.threshold = config.threshold
        self.keys = WatermarkKeys.read(config.secret_file)

    def marked(self, exchange: Exchange, asked: bool | None, params: SamplingParams) -> SamplingParams:
        """The parameters of an answer, with the key if it is to be marked."""
        decision = self._decide(exchange, asked)
        if decision == "no":
            return params
        assert self.keys is not None
        if params.greedy or params.top_k == 1 or params.top_p <= NO_CHOICE_TOP_P:
            if decision == "must":
                raise InvalidRequest(
                    "The answer cannot be watermarked: a watermark is in the choice between tokens, and with "
                    f"{'`temperature` 0' if params.greedy else '`top_k` 1 or `top_p` 0'} there is none.",
                    param="temperature" if params.greedy else "top_k" if params.top_k == 1 else "top_p",
                    code="watermark_impossible",
                )
            _tell(exchange, marked=False)
            return params
        _tell(exchange, marked=True)
        return replace(params, watermark=self.keys.marking(exchange.caller.tenant))

    def check_remote(self, exchange: Exchange, asked: bool | None, model: str) -> None:
        """Another server samples the tokens of a remote model: nothing can be marked there."""
        decision = self._decide(exchange, asked)
        if decision == "must":
            raise InvalidRequest(
                f"The answer cannot be watermarked: `{model}` runs on another server, which chooses the tokens itself.",
                param="model",
                code="remote_model",
            )
        if decision == "may":
            _tell(exchange, marked=False)

    def _decide(self, exchange: Exchange, asked: bool | None) -> Decision:
        if asked is None:
            asked = _header(exchange)
        use, whose = self._rule(exchange)
        if use == "always":
            if asked is False:
                raise InvalidRequest(f"Answers of {whose} are always watermarked.", param="watermark")
            decision: Decision = "must"
        elif use == "never":
            if asked:
                raise InvalidRequest(f"Answers of {whose} are never watermarked.", param="watermark")
            decision = "no"
        elif asked is not None:
            decision = "must" if asked else "no"
        else:
            decision = "may" if use == "default" else "no"
        if decision != "no" and self.keys is None:
            if decision == "may":
                return "no"
            raise InvalidRequest(
                "The answer cannot be watermarked: this server has no secret for that (`watermark.secret_file`).",
                param="watermark",
                code="watermark_unavailable",
            )
        return decision

    def _rule(self, exchange: Exchange) -> tuple[Watermarking, str]:
        """What holds for the caller, and whose rule it is: the most specific one."""
        caller = exchange.caller
        if caller.key_limits.watermark is not None:
            return caller.key_limits.watermark, "this key"
        if caller.limits.watermark is not None:
            return caller.limits.watermark, "this tenant"
        of_tier = self._of_tiers.get(caller.tier) if caller.key else None
        return (self._use, "this server") if of_tier is None else (of_tier, f"the tier `{caller.tier}`")


def _header(exchange: Exchange) -> bool | None:
    sent = exchange.header(HEADER)
    if sent is None:
        return None
    word = sent.strip().lower()
    if word not in (b"true", b"false"):
        raise InvalidRequest("The header `x-penstock-watermark` is true or false.", param=HEADER.decode())
    return word == b"true"


def _tell(exchange: Exchange, *, marked: bool) -> None:
    exchange.extra_headers = [pair for pair in exchange.extra_headers if pair[0] != HEADER]
    exchange.extra_headers.append((HEADER, b"true" if marked else b"false"))
