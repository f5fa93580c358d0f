"""`/metrics` shows an engine's host tier, GPUs and cost."""

from penstock.engine.request import DeviceLoad, EngineLoad, HandoverLoad
from penstock.telemetry.metrics import EngineView, Metrics


def test_the_host_tier_is_visible() -> None:
    load = EngineLoad(
        host_blocks=3, total_host_blocks=40, offloaded_blocks=17, restored_blocks=11, host_hit_tokens=176,
        disk_blocks=70, total_disk_blocks=90, disk_written_blocks=80, disk_read_blocks=5,
    )  # fmt: skip
    text = Metrics(lambda: [EngineView("m", "e", True, None, load)]).render().decode()
    for name, value in {
        "penstock_kv_host_blocks_used": 3,
        "penstock_kv_host_blocks": 40,
        "penstock_kv_blocks_offloaded_total": 17,
        "penstock_kv_blocks_restored_total": 11,
        "penstock_kv_host_hit_tokens_total": 176,
        "penstock_kv_disk_blocks_used": 70,
        "penstock_kv_disk_blocks": 90,
        "penstock_kv_disk_blocks_written_total": 80,
        "penstock_kv_disk_blocks_read_total": 5,
    }.items():
        line = next(line for line in text.splitlines() if line.startswith(name + "{"))
        assert line.endswith((f" {value}", f" {value}.0")), line
        assert 'model_name="m"' in line


def test_gpus_and_cost_are_visible_where_there_are_any() -> None:
    gpus = [DeviceLoad(0, 30, 80, 0.25), DeviceLoad(1, 40, 80, 0.5)]
    views = [
        EngineView("big", "0", True, None, EngineLoad(devices=gpus), cost_per_hour=7.2),
        EngineView("small", "0", True, None, EngineLoad()),
    ]
    lines = Metrics(lambda: views).render().decode().splitlines()
    for line in (
        'penstock_gpu_memory_used_bytes{model_name="big",engine="0",gpu="1"} 40',
        'penstock_gpu_memory_total_bytes{model_name="big",engine="0",gpu="0"} 80',
        'penstock_gpu_utilization_ratio{model_name="big",engine="0",gpu="0"} 0.25',
        'penstock_engine_cost_dollars_per_second{model_name="big",engine="0"} 0.002',
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith("penstock_gpu_") and "small" in line]


def test_prompts_handed_over_are_visible_where_there_are_any() -> None:
    handover = HandoverLoad(
        waiting=1, handovers=2, fallbacks=3, seconds=0.5, blocks_in=4, bytes_in=5, blocks_out=6, bytes_out=7
    )
    views = [
        EngineView("m", "0", True, None, EngineLoad(handover=handover)),
        EngineView("plain", "0", True, None, EngineLoad()),
    ]
    lines = Metrics(lambda: views).render().decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if line.startswith("penstock_handover"))
    labels = '{model_name="m",engine="0"}'
    assert {name.removesuffix(labels).removeprefix("penstock_"): float(value) for name, value in shown.items()} == {
        "handover_waiting": 1,
        "handovers_total": 2,
        "handover_fallbacks_total": 3,
        "handover_seconds_total": 0.5,
        "handover_blocks_received_total": 4,
        "handover_bytes_received_total": 5,
        "handover_blocks_sent_total": 6,
        "handover_bytes_sent_total": 7,
    }
