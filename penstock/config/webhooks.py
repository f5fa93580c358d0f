"""Settings of webhooks."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.fields import setting


@dataclass(frozen=True, slots=True)
class WebhooksConfig:
    """Webhooks: tenants are told when their responses in the background and batches end. They need a store."""

    enabled: bool = setting(
        False, doc="Whether tenants may register endpoints, to which the gateways then send signed requests."
    )
    networks: tuple[str, ...] = setting(
        (), doc="Private networks that endpoints may be in; empty: public addresses only.", example="[10.1.0.0/16]"
    )
    plain_http: bool = setting(False, doc="Whether endpoints may have http:// URLs, without TLS.")
    timeout_s: float = setting(15.0, doc="Time limit of a delivery, in seconds.", least=0.1, most=120)
    retry_s: float = setting(72 * 3600.0, doc="Seconds after an event in which its delivery is tried again.", least=1)
    per_tenant: int = setting(10, doc="Maximum of endpoints per tenant.", least=1, most=1000)
    waiting_per_endpoint: int = setting(
        10_000, doc="Maximum of deliveries to an endpoint that wait; events beyond are not delivered.", least=1
    )
