"""Who uses what, and what it costs."""

from __future__ import annotations

from panels import COST, MODELS, TENANTS, Board, Panel, U, rate

CACHED, PROMPT = (rate("penstock_usage_tokens_total", "tenant", f'{U}, kind="{kind}"') for kind in ("cached", "prompt"))


def hourly(by: str = "") -> str:
    """Dollars charged per hour, at the rate of the moment."""
    return f"3600 * {rate('penstock_usage_cost_dollars_total', by, U)}"


def day(metric: str, by: str) -> str:
    return f"sum by ({by}) (increase({metric}{{{U}}}[24h]))"


TENANTS_AND_COST = Board(
    "penstock-tenants",
    "Penstock / Tenants and cost",
    "Who uses what, what they are charged, and what the hardware costs meanwhile.",
    [
        (
            "Money",
            5,
            [
                Panel(
                    "Charged per hour",
                    "At the current rate, all tenants shown.",
                    {"dollars": hourly()},
                    "currencyUSD",
                    "stat",
                ),
                Panel(
                    "Hardware per hour",
                    "From `models[N].cost_per_hour`.",
                    {"dollars": f"3600 * {COST}"},
                    "currencyUSD",
                    "stat",
                ),
                Panel(
                    "Tokens per dollar",
                    "Generated tokens per dollar of hardware.",
                    {"tokens": f"{rate('vllm:generation_tokens_total')} / {COST}"},
                    kind="stat",
                ),
                Panel(
                    "Dollars per million tokens",
                    "What a million generated tokens cost in hardware.",
                    {"dollars": f"1e6 * {COST} / {rate('vllm:generation_tokens_total')}"},
                    "currencyUSD",
                    "stat",
                ),
            ],
        ),
        (
            "Tenants",
            8,
            [
                Panel(
                    "Charged by tenant",
                    "Dollars per hour.",
                    {"{{tenant}}": hourly("tenant")},
                    "currencyUSD",
                    stack=True,
                ),
                Panel(
                    "Tokens by tenant",
                    "Prompt and completion tokens per second.",
                    {"{{tenant}}": rate("penstock_usage_tokens_total", "tenant", f'{U}, kind!="cached"')},
                    stack=True,
                ),
                Panel(
                    "Requests by tenant",
                    "Settled requests per second.",
                    {"{{tenant}}": rate("penstock_usage_requests_total", "tenant", U)},
                    stack=True,
                ),
            ],
        ),
        (
            "What for",
            8,
            [
                Panel(
                    "Charged by model and adapter",
                    "Dollars per hour.",
                    {"{{model_name}} {{adapter}}": hourly("model_name, adapter")},
                    "currencyUSD",
                    stack=True,
                ),
                Panel(
                    "Charged by feature",
                    "Dollars per hour; `other` when there are too many features to tell apart.",
                    {"{{feature}}": hourly("feature")},
                    "currencyUSD",
                    stack=True,
                ),
                Panel(
                    "Cached share of prompts",
                    "By tenant. Low where prompts could begin alike: an invitation to put what varies last.",
                    {"{{tenant}}": f"{CACHED} / {PROMPT}"},
                    "percentunit",
                ),
            ],
        ),
        (
            "Last day",
            8,
            [
                Panel(
                    "Charged in 24 hours",
                    "By tenant.",
                    {"{{tenant}}": day("penstock_usage_cost_dollars_total", "tenant")},
                    "currencyUSD",
                    "bargauge",
                ),
                Panel(
                    "Tokens in 24 hours",
                    "By tenant and kind.",
                    {"{{tenant}} {{kind}}": day("penstock_usage_tokens_total", "tenant, kind")},
                    kind="bargauge",
                ),
            ],
        ),
    ],
    {"model": MODELS, "tenant": TENANTS},
)
