"""POST /v1/watermark/detect: whether a text carries the watermark of the caller's own tenant."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.permissions import Permissions
from penstock.gateway.generation.request_decoder import RequestDecoder
from penstock.gateway.generation.tokenization import Tokenization, check_counted, check_size
from penstock.gateway.generation.watermarks import Watermarks
from penstock.protocol.errors import InvalidRequest
from penstock.text.watermark import detect

MOST_TOKENS = 16_384
"""Of one text; a detection then takes about a second of one core."""


class DetectRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    text: str
    model: str | None = None
    """Whose tokenizer the text was made with; the first model when not given."""
    threshold: Annotated[float, Meta(gt=0, le=0.5)] | None = None


_decoder = RequestDecoder(DetectRequest)


class WatermarkEndpoints:
    """Looks for watermarks."""

    def __init__(
        self,
        permissions: Permissions,
        tokenization: Tokenization,
        quotas: Quotas,
        watermarks: Watermarks,
        body_limit: int,
    ) -> None:
        self._permissions = permissions
        self._tokenization = tokenization
        self._quotas = quotas
        self._watermarks = watermarks
        self._body_limit = body_limit

    async def detect(self, exchange: Exchange) -> None:
        request = _decoder(exchange, await exchange.body(self._body_limit))
        keys = self._watermarks.keys
        if keys is None:
            raise InvalidRequest(
                "This server has no secret for watermarks (`watermark.secret_file`).", code="watermark_unavailable"
            )
        if not request.text.strip():
            raise InvalidRequest("`text` is empty.", param="text")
        permissions = self._permissions
        model = await permissions.find(exchange, request.model or permissions.first(exchange).name)
        tenant = exchange.caller.tenant
        check_size(model, len(request.text), MOST_TOKENS, "text")
        async with self._quotas.text_work(exchange, model.base_name, exchange.body_size, only=True) as work:
            tokens = await self._tokenization.encode(
                model, request.text, tenant=tenant, most=MOST_TOKENS, add_special_tokens=False
            )
            check_counted(len(tokens), MOST_TOKENS, "text")
            work.tokens = len(tokens)
            found = await self._tokenization.run(tenant, len(request.text), detect, tokens, keys.detecting(tenant))
        threshold = self._watermarks.threshold if request.threshold is None else request.threshold
        passage = None
        if found.passage is not None and found.p_value <= threshold:
            first, last = found.passage
            passage = model.text.decode(tokens[first : last + 1])
        await exchange.reply_json(
            {
                "object": "watermark.detection",
                "model": model.name,
                "verdict": found.verdict(threshold),
                "p_value": found.p_value,
                "threshold": threshold,
                "tokens": found.tokens,
                "scored_tokens": found.scored,
                "passage": passage,
            }
        )
