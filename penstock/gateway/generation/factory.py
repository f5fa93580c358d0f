"""What the makers of generations have in common, whichever endpoint a request comes from."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.accounting.request_limits import Cap, CapName
from penstock.gateway.app.exchange import Exchange
from penstock.gateway.generation.model_access import ModelAccess
from penstock.gateway.generation.response_format import GrammarCache
from penstock.gateway.generation.sampling import TokenLimit
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.stages import ContentFilter
from penstock.gateway.generation.tokenization import Tokenization
from penstock.gateway.generation.watermarks import Watermarks
from penstock.routing.placement import Placement
from penstock.routing.registry import ServedModel
from penstock.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFactory:
    """The parts that a request needs to become a generation."""

    settings: GenerationSettings
    models: ModelAccess
    tokenization: Tokenization
    grammars: GrammarCache
    quotas: Quotas
    admissions: Admissions
    metrics: Metrics
    content_filter: ContentFilter
    watermarks: Watermarks

    def place(
        self, exchange: Exchange, model: ServedModel, priority: int, prompt_tokens: int, limit: TokenLimit
    ) -> Placement:
        """Where a request may run. One whose answer may be clipped needs only room for its prompt."""
        asked = None if limit.clip else limit.max_tokens
        return self.admissions.place(exchange, model, priority, prompt_tokens, asked)

    def cap(self, exchange: Exchange, name: CapName, model: str) -> Cap | None:
        """The caller's limit of this kind for a request to `model`, which an answer names if it ends it."""
        return self.quotas.requests.noted(exchange, name, model)
