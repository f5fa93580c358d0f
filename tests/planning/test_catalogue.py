"""The catalogue: what is in it, what a user's file changes, and what its mistakes are answered with."""

from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.planning.catalogue import PRICE_KINDS, api_prices, device, devices, load_catalogue, this_machine
from penstock.planning.model_shape import known_models

WANTED = ["rtx-4090", "a10", "l4", "l40s", "a100-40", "a100-80", "h100", "h200", "b200", "mi300x", "cpu-2", "cpu-16"]


def written(folder: Path, text: str) -> Path:
    file = folder / "own.yaml"
    file.write_text(text)
    return file


def test_every_device_is_complete_and_says_where_its_figures_are_from() -> None:
    found = devices()
    assert {*WANTED, "cpu-64"} <= {entry.name for entry in found}
    for entry in found:
        assert entry.source != "not given" and entry.date.startswith("202")
        assert entry.flops["fp32"] > 0 and entry.bandwidth > 1e9 and entry.link.bandwidth > 0
        prices = [entry.prices.of(kind) for kind in PRICE_KINDS]
        assert all(price is not None and price > 0 for price in prices)
        assert entry.prices.spot <= entry.prices.on_demand  # type: ignore[operator]


def test_peaks_are_dense_and_fp8_exists_where_the_hardware_has_it() -> None:
    assert device("h100").flops["bf16"] == pytest.approx(989e12)
    assert device("h100").flops["fp8"] == pytest.approx(2 * device("h100").flops["bf16"], rel=1e-3)
    assert "fp8" not in device("a100-80").flops and "fp4" in device("b200").flops
    assert device("a100-80").flops_in("fp8") == device("a100-80").flops["bf16"], "widened as they are read"
    assert device("cpu-2").flops_in("bf16") == device("cpu-2").flops["fp32"]


@pytest.mark.parametrize(
    ("name", "meant"), [("H100-SXM", "h100"), ("h100_sxm", "h100"), ("RTX 4090", "rtx-4090"), ("A100", "a100-80")]
)
def test_names_in_any_case_and_aliases(name: str, meant: str) -> None:
    assert device(name).name == meant


def test_an_unknown_device_names_the_nearest_and_how_to_list_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown device 'h300'; the nearest are h200, h100.*--hardware list"):
        device("h300")


def test_this_machine_has_its_own_cores_and_memory_and_no_price() -> None:
    here = this_machine()
    assert here.kind == "cpu" and here.cores >= 1 and here.memory_bytes > 1 << 28
    assert here.prices.on_demand is None and load_catalogue().device("this-machine") == here


@pytest.mark.parametrize(
    ("flags", "speed"), [("avx512f amx_int8 amx_bf16", "cpu-2-amx"), ("avx2 avx512_vnni", "cpu-2-avx512")]
)
def test_this_machine_is_as_fast_as_one_that_has_matrix_tiles_or_none_as_well(
    flags: str, speed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"flags\t: {flags}")
    assert dict(this_machine().flops) == dict(device(speed).flops)


def test_api_prices_carry_source_and_date_and_name_models_that_are_known() -> None:
    prices = {price.name: price for price in api_prices()}
    assert len(prices) > 10
    for price in prices.values():
        assert 0 < price.cached <= price.input <= price.output and price.source and price.date
        assert price.serves is None or price.serves in known_models()
    assert load_catalogue().api("gpt-4o").output == 10
    with pytest.raises(ConfigError, match="unknown API 'gpt-9'; the nearest are"):
        load_catalogue().api("gpt-9")


def test_a_users_file_goes_over_the_built_in_one_key_by_key(tmp_path: Path) -> None:
    own = written(
        tmp_path,
        """
devices:
  h100: {price: {on_demand: 1.99}}
  b300:
    kind: gpu
    memory: 268GiB
    bandwidth: 8000
    tflops: {bf16: 2500, fp8: 5000, fp4: 15000}
    link: {name: NVLink 5, gb_s: 900, latency_us: 6}
    network: {name: InfiniBand, gb_s: 100, latency_us: 12}
    devices_per_node: 8
    host_memory: 256GiB
    price: {on_demand: 7.5}
apis:
  ours/internal: {input: 0.5, output: 1.5}
""",
    )
    catalogue = load_catalogue(own)
    assert catalogue.device("h100").prices.on_demand == 1.99
    assert catalogue.device("h100-sxm").prices.reserved == device("h100").prices.reserved
    assert catalogue.device("B300").prices.spot is None and catalogue.api("internal").cached == 0.5
    assert device("h100").prices.on_demand != 1.99, "the built-in one is as it was"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "devices: {h100: {price: {on_demand: -2}}}",
            r"own.yaml:1: h100.price.on_demand: must be US dollars, 0 or more",
        ),
        (
            "devices:\n  h100:\n    bandwith: 3",
            r"own.yaml:3: h100: there is no key 'bandwith'; did you mean bandwidth\?",
        ),
        ("devices:\n  h100:\n    memory: lots", r"own.yaml:3: h100.memory: must be a size such as"),
        ("devices:\n  h100:\n    tflops: {fp7: 3}", r"own.yaml:3: h100.tflops: must map one or more of fp32, bf16"),
        ("devices:\n  h100:\n    kind: tpu", r"own.yaml:3: h100.kind: must be one of gpu, cpu, found 'tpu'"),
        ("devices: {mine: {kind: gpu}}", r"own.yaml:1: mine: memory is needed: must be a size"),
        ("gpus: {}", r"own.yaml:1: the file must have one or more of devices, apis at the top, found gpus"),
        ("devices: [1]", r"own.yaml:1: devices must hold names"),
        ("devices: {h100: 3}", r"own.yaml:1: h100: expected keys and values, found 3"),
        ("apis: {x: {input: 0, output: 1}}", r"own.yaml:1: x.input: must be a number above 0, found 0"),
        ("- 1", r"own.yaml:1: the file must have"),
        ("a: [", r"own.yaml:1: not valid YAML"),
    ],
)
def test_a_mistake_in_a_users_file_names_line_key_and_what_is_allowed(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_catalogue(written(tmp_path, text))


def test_a_missing_file_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_catalogue(tmp_path / "none.yaml")
