"""What an engine counts about its host tier is what `/metrics` shows."""

from penstock.engine.request import Load
from penstock.telemetry.metrics import EngineView, Metrics


def test_the_host_tier_is_visible() -> None:
    load = Load(
        host_blocks=3, total_host_blocks=40, offloaded_blocks=17, restored_blocks=11, host_hit_tokens=176,
    )  # fmt: skip
    text = Metrics(lambda: [EngineView("m", "e", True, None, load)]).render().decode()
    for name, value in {
        "penstock_kv_host_blocks_used": 3,
        "penstock_kv_host_blocks": 40,
        "penstock_kv_blocks_offloaded_total": 17,
        "penstock_kv_blocks_restored_total": 11,
        "penstock_kv_host_hit_tokens_total": 176,
    }.items():
        line = next(line for line in text.splitlines() if line.startswith(name + "{"))
        assert line.endswith((f" {value}", f" {value}.0")), line
        assert 'model_name="m"' in line
