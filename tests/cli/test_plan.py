"""`penstock plan`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli.app import app
from penstock.errors import ConfigError

TEXTBOOK = "llama-3-70b --gpu h100 --users 100000 --requests 10 --input 2000 --output 500"


def run(line: str) -> Result:
    return CliRunner().invoke(app, ["plan", *line.split()], env={"COLUMNS": "100"})


def printed(line: str) -> str:
    result = run(line)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def textbook() -> str:
    return printed(f"{TEXTBOOK} --slo-ttft 500 --slo-itl 50 --api-price together/llama-3.3-70b")


def test_the_textbook_case_as_tables(textbook: str) -> None:
    assert re.search(r"average +11\.57 +23,148 +0 +5,787", textbook)
    assert re.search(r"peak \(x 3\) +34\.72 +69,444 +0 +17,361", textbook)
    assert "KV cache 320 KiB per token in bf16" in textbook
    assert re.search(r"^h100 x\d +\S+/\S+ +\d+ +\d+ +\d+ +[\d.]+ +[\d,]+ +[\d.]+ +[\d.]+$", textbook, re.M)
    assert re.search(r"^total +[\d,]+ +[\d,]+$", textbook, re.M)
    assert "Against an API" in textbook and "$66,917 a month" in textbook
    for name in ("input tokens", "GPU price", "utilisation", "cache hit rate"):
        assert re.search(rf"^{name} ", textbook, re.M)


def test_every_assumption_is_printed_with_its_source(textbook: str) -> None:
    told = textbook[textbook.index("Assumptions") :]
    for words in (
        "price of h100 per hour",
        "efficiency",
        "datasheet",
        "together.ai/pricing",
        "2025-11-01",
        "730 hours",
    ):
        assert words in told


def test_json_is_the_whole_plan() -> None:
    tree = json.loads(printed(f"{TEXTBOOK} --json"))
    assert tree["workload"]["requests_per_day"] == 1_000_000
    assert tree["best"]["device"] == "h100"
    assert tree["best"]["monthly"] == min(one["monthly"] for one in tree["candidates"])
    assert tree["api"]["price"]["name"]


def test_without_arguments_it_plans_the_default_model_on_this_machine() -> None:
    shown = printed("")
    assert "smollm2-135m: 0.135 B parameters" in shown
    assert re.search(r"^this-machine ", shown, re.M)
    assert "users a day with headroom" in shown
    assert "Bill of a month" not in shown  # it is here already


def test_a_page_with_every_chart_that_fetches_nothing(tmp_path: Path) -> None:
    page = tmp_path / "new" / "plan.html"
    shown = run(f"{TEXTBOOK} --html {page}")
    assert shown.exit_code == 0 and str(page) in shown.output
    text = page.read_text()
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    titles = [ElementTree.fromstring(drawing)[0].text or "" for drawing in drawings]
    assert [title.split(",")[0].split(" by ")[0] for title in titles] == [
        "Monthly bill", "Concurrency", "Load and devices over the day", "Self-hosting against an API", "Monthly bill"
    ]  # fmt: skip
    assert not re.search(r"(src|href)=|url\(|@import", text)
    assert "nan" not in text.lower().replace("nano", "")
    assert text.count("<table") >= 6 and "Assumptions" in text


def test_charts_as_files(tmp_path: Path) -> None:
    assert run(f"{TEXTBOOK} --charts {tmp_path}").exit_code == 0
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == [f"plan-{name}.svg" for name in ("break-even", "concurrency", "cost", "day", "sensitivity")]
    for path in tmp_path.iterdir():
        ElementTree.fromstring(path.read_text())


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--hardware list", ["rtx-4090", "mi300x", "NVLink", "cpu-64", "on demand"]),
        ("--models list", ["llama-3.3-70b", "320", "deepseek"]),
        ("--api-price list", ["together/llama-3.3-70b", "0.88", "cached"]),
    ],
)
def test_lists(line: str, words: list[str]) -> None:
    shown = CliRunner().invoke(app, ["plan", *line.split()], env={"COLUMNS": "200"}).output
    assert all(word in shown for word in words), shown


def test_a_catalogue_of_ones_own(tmp_path: Path) -> None:
    prices = tmp_path / "mine.yaml"
    prices.write_text("devices:\n  h100:\n    price: {on_demand: 1.0}\n")
    tree = json.loads(printed(f"{TEXTBOOK} --json --catalogue {prices}"))
    assert tree["best"]["static"]["gpus"] == pytest.approx(tree["best"]["devices"] * 730)


def test_several_devices_and_formats() -> None:
    tree = json.loads(printed("llama-3-8b --gpu l4,l40s --gpu a10 --weights int4 --kv auto --tp 1 --pp 1 --json"))
    tried = {(one["device"], one["weight_dtype"], one["tensor_parallel"]) for one in tree["candidates"]}
    assert tried == {("l4", "int4", 1), ("l40s", "int4", 1), ("a10", "int4", 1)}


def test_what_penstock_does_not_run_is_planned_when_named_and_said() -> None:
    tree = json.loads(printed("llama-3-8b --json --tp 1 --kv auto"))
    assert "mi300x" not in {one["device"] for one in tree["candidates"]}
    named = json.loads(printed("llama-3-8b --gpu mi300x --json --tp 1 --kv auto"))
    assert {"what": "engine", "value": "as if Penstock ran AMD Instinct MI300X GPUs: it does not"}.items() <= next(
        one for one in named["assumptions"] if one["what"] == "engine"
    ).items()


def test_a_shared_prefix_host_memory_and_speculation() -> None:
    line = "llama-3-8b --gpu l40s --tp 1 --kv auto --weights auto --users 20000 --input 1000"
    plain = json.loads(printed(f"{line} --json"))
    shared = json.loads(printed(f"{line} --json --shared-prefix 800 --host-memory 32GiB --acceptance 0.6"))
    assert shared["workload"]["cache_hit_rate"] == pytest.approx(0.8)
    assert shared["best"]["most"]["requests_per_s"] > plain["best"]["most"]["requests_per_s"]
    assert shared["best"]["memory"]["host_tokens"] == 2**35 // (128 * 1024)
    assert any(one["what"] == "speculation" for one in shared["assumptions"])
    told = printed(f"{line} --shared-prefix 800 --host-memory 32GiB")
    assert "instead of" in told and "kept for their next turn" in told


def test_a_fleet_that_follows_the_day_is_ranked_by_its_own_bill() -> None:
    tree = json.loads(printed(f"{TEXTBOOK} --json --autoscale --reserved 0.4 --spot 0.2 --curve office"))
    assert tree["best"]["monthly"] == tree["best"]["autoscaled"]["total"]
    assert tree["best"]["autoscaled"]["gpu_hours"]["reserved"] > 0


def test_a_calibration_of_ones_own(tmp_path: Path) -> None:
    from dataclasses import replace

    from penstock.planning.calibration import calibration_for, write_calibration
    from penstock.planning.catalogue import device

    mine = replace(calibration_for(device("h200")), device="h100", step_s=0.03)
    write_calibration(mine, tmp_path / "mine.yaml")
    slow = json.loads(printed(f"{TEXTBOOK} --json --calibration {tmp_path / 'mine.yaml'}"))
    fast = json.loads(printed(f"{TEXTBOOK} --json"))
    assert slow["best"]["monthly"] > fast["best"]["monthly"]
    assert slow["best"]["calibration"].startswith("h100, ")


def test_a_folder_with_a_configuration(tmp_path: Path) -> None:
    from penstock.planning.model_shape import known_config

    (tmp_path / "config.json").write_text(json.dumps(known_config("llama-3.1-8b")))
    tree = json.loads(printed(f"{tmp_path} --gpu l40s --json"))
    assert tree["model"]["parameters"] == pytest.approx(8.03e9, rel=0.001)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("llama-3-70b --gpu h1000", "unknown device 'h1000'; the nearest are h100"),
        ("llama-9-70b --gpu h100", "unknown model 'llama-9-70b'; the nearest are "),
        ("llama-3-70b --gpu h100 --tp 1 --pp 1 --weights bf16", "does not fit: bf16 weights .* would do"),
        ("llama-3-70b --gpu h100 --users -5", "users must be more than 0, not -5"),
        ("llama-3-70b --gpu h100 --requests 0", "requests per user and day must be more than 0, not 0"),
        ("smollm2-135m --gpu h100 --output 100000", "do not fit the context of 8,192 tokens of smollm2-135m"),
        ("llama-3-70b --gpu h100 --context 100", "a context of 100 tokens is shorter than requests of up to 750"),
        ("llama-3-70b --gpu h100 --slo-ttft -1", "--slo-ttft must be 0 .any. or more milliseconds, not -1"),
        ("llama-3-70b --gpu h100 --slo-itl 0.1", "keeps .* under 0.1 ms per token: the nearest, .* choose faster"),
        ("llama-3-70b --gpu h100 --weights int5", "--weights int5: must be one of auto, "),
        ("llama-3-70b --gpu h100 --kv int4", "--kv int4: must be one of auto, "),
        ("llama-3-70b --gpu h100 --curve mondays", "no curve is named mondays; known: flat, office, consumer"),
        ("llama-3-70b --gpu h100 --peak 1", "peak factor 1 is below the busiest hour of the curve consumer"),
        ("llama-3-70b --gpu h100 --reserved 0.8 --spot 0.8", "must add up to 1"),
        ("llama-3-70b --gpu h100 --utilisation 1.5", "utilisation is a share above 0, at most 1, not 1.5"),
        ("llama-3-70b --gpu h100 --spares -1", "spare replicas must be 0 or more, not -1"),
        ("llama-3-70b --gpu h100 --wage -1", "hourly wage must be 0 or more, not -1"),
        ("llama-3-70b --gpu h100 --cache-hit-rate 1.5", "the cache hit rate is a share from 0 to below 1, not 1.5"),
        ("llama-3-70b --gpu h100 --tp 3", "tensor_parallel: 3 cannot split 64 heads"),
        ("llama-3-70b --gpu h100 --pp 81", "pipeline_parallel: 81 is more than the 80 layers"),
        ("llama-3-70b --gpu a10 --tp 8", "8 is more than the 4 devices of one machine with a10"),
        ("llama-3-70b --gpu h100 --draft llama-3-8b", "--draft needs --acceptance"),
        ("llama-3-70b --gpu cpu-16 --tp 2", "tensor_parallel and pipeline_parallel are for GPUs; run replicas instead"),
        ("llama-3-70b --gpu h100 --host-memory much", "--host-memory much: give a size such as"),
        ("llama-3-70b --gpu h100 --acceptance 2", "acceptance: 2 is not a probability"),
        ("llama-3-70b --gpu h100 --shared-prefix 500", "fewer than the 500 of the input, not 500"),
        ("llama-3-70b --gpu h100 --api-price acme", "unknown API 'acme'"),
        ("llama-3-70b --gpu h100 --catalogue missing.yaml", "missing.yaml: cannot be read: No such file"),
        ("llama-3-70b --gpu h100 --calibration missing.yaml", "cannot read the calibration missing.yaml"),
        ("llama-3-70b --models some", "--models some: the only value is list"),
        ("llama-3-70b --gpu h100 --html /dev/null/page.html", "cannot be written"),
        ("no-such-folder/model --gpu h100", "there is no such path"),
    ],
)
def test_bad_input_is_one_sentence_that_says_what_would_do(line: str, said: str) -> None:
    error = run(line).exception
    assert isinstance(error, ConfigError), error
    assert re.search(said, str(error)), str(error)
    assert "\n" not in str(error)
