"""The dashboard of usage and cost by tenant."""

from __future__ import annotations

from panels import COST, MODELS, TENANTS, Board, Panel, U, rate

CACHED, PROMPT = (rate("penstock_usage_tokens_total", "tenant", f'{U}, kind="{kind}"') for kind in ("cached", "prompt"))
THOUGHT = rate("penstock_usage_reasoning_tokens_total", "tenant", U)
COMPLETION = rate("penstock_usage_tokens_total", "tenant", f'{U}, kind="completion"')


def hourly(by: str = "") -> str:
    """Dollars charged per hour, at the current rate."""
    return f"3600 * {rate('penstock_usage_cost_dollars_total', by, U)}"


def day(metric: str, by: str) -> str:
    return f"sum by ({by}) (increase({metric}{{{U}}}[24h]))"


TENANTS_AND_COST = Board(
    "penstock-tenants",
    "Penstock / Tenants and cost",
    "Usage and charges by tenant, model and feature, and the cost of the hardware.",
    [
        (
            "Cost",
            5,
            [
                Panel(
                    "Charged per hour",
                    "At the current rate, for the selected tenants.",
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
                    "Hardware cost of a million generated tokens.",
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
            "Models and features",
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
                    "Dollars per hour; `other` collects features beyond the limit of series.",
                    {"{{feature}}": hourly("feature")},
                    "currencyUSD",
                    stack=True,
                ),
                Panel(
                    "Cached share of prompts",
                    "By tenant. If low, move the parts of prompts that vary to the end: prompts then share a prefix.",
                    {"{{tenant}}": f"{CACHED} / {PROMPT}"},
                    "percentunit",
                ),
                Panel(
                    "Reasoning share of answers",
                    "By tenant: completion tokens that are thoughts. Lower `reasoning_effort` or a thinking budget.",
                    {"{{tenant}}": f"{THOUGHT} / {COMPLETION}"},
                    "percentunit",
                ),
            ],
        ),
        (
            "Last 24 hours",
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
