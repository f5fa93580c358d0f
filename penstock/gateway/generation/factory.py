"""What the makers of generations have in common, whichever endpoint a request comes from."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.accounting.admission import Admissions
from penstock.gateway.accounting.quotas import Quotas
from penstock.gateway.generation.model_access import ModelAccess
from penstock.gateway.generation.response_format import GrammarCache
from penstock.gateway.generation.settings import GenerationSettings
from penstock.gateway.generation.stages import ContentFilter
from penstock.gateway.generation.tokenization import Tokenization
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
