"""Plans against sums by hand: memory, capacity, fleet and money together; what is chosen, and why others are not."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from penstock.errors import ConfigError
from penstock.planning.candidate import Candidate, Options, deployments, window
from penstock.planning.capacity import Slo
from penstock.planning.catalogue import ApiPrice, Prices, device
from penstock.planning.deployment import Deployment
from penstock.planning.model_shape import model_shape
from penstock.planning.money import Overheads, PriceMix
from penstock.planning.plan import Plan, bills_at, make_plan, require
from penstock.planning.plan_tree import as_tree
from penstock.planning.provision import Headroom
from penstock.planning.workload import CURVES, Workload

LLAMA_70B = model_shape("llama-3-70b")
H100 = replace(device("h100"), prices=Prices(on_demand=3.0, reserved=2.0, spot=1.5))
TEXTBOOK = Workload(users=100_000, requests_per_user=10, input_tokens=2_000, output_tokens=500)
SLO = Slo(ttft_s=0.5, itl_s=0.05)
API = ApiPrice("an API", input=0.88, output=0.88, source="invented", date="2026-11-16")


@pytest.fixture(scope="module")
def textbook() -> Plan:
    return make_plan(LLAMA_70B, [H100], TEXTBOOK, SLO, api=API)


def test_every_candidate_keeps_the_objectives_at_the_planned_peak(textbook: Plan) -> None:
    assert textbook.candidates
    for one in textbook.candidates:
        assert one.steady.ttft_s <= 0.5 and one.steady.itl_s <= 0.05
        assert one.memory.fits
        busy = one.fleet.replicas - 1
        assert busy * one.most.requests_per_s * 0.8 >= 34.722
        assert one.steady.requests_per_s == pytest.approx(34.7222 / busy, rel=1e-4)


def test_the_fleet_and_the_bill_by_hand(textbook: Plan) -> None:
    best = require(textbook)
    replicas = math.ceil(34.72222 / (0.8 * best.most.requests_per_s)) + 1
    assert best.fleet.replicas == replicas
    gpus = replicas * best.deployment.devices
    assert best.fleet.devices == gpus
    assert best.fleet.nodes == math.ceil(replicas / (8 // best.deployment.devices))
    assert best.static.gpus.dollars == pytest.approx(gpus * 730 * 3.0)
    weights_gb = 70.55 * (1 if best.deployment.weights.name == "fp8" else 2)
    rest = 40 * 100 + 3_802.0833 * 0.09 + (weights_gb + 300) * 0.08
    assert best.monthly == best.static.total == pytest.approx(gpus * 730 * 3.0 + rest, rel=1e-5)
    assert best.autoscaled.total < best.static.total


def test_the_textbook_takes_tens_of_gpus_not_hundreds(textbook: Plan) -> None:
    # 70 B parameters x 2 x (69,444 + 17,361) tokens/s is 12.3 PFLOP/s at peak: 12 H100 in bf16 at 100%, 6 in FP8. Half
    # of the peak and 80% utilisation give some 16 to 32, and spare replicas come on top.
    best = require(textbook)
    assert 8 <= best.fleet.devices <= 64


def test_the_cheapest_comes_first_and_the_bill_that_counts_is_the_options_choice(textbook: Plan) -> None:
    bills = [one.monthly for one in textbook.candidates]
    assert bills == sorted(bills)
    scaled = make_plan(LLAMA_70B, [H100], TEXTBOOK, SLO, Options(autoscaled=True))
    assert all(one.monthly == one.autoscaled.total for one in scaled.candidates)
    assert [one.monthly for one in scaled.candidates] == sorted(one.monthly for one in scaled.candidates)


def test_input_and_output_prices_add_up_to_the_bill(textbook: Plan) -> None:
    best = require(textbook)
    millions = 1e6 * 730 / 24 / 1e6
    assert millions * (2_000 * best.tokens.input + 500 * best.tokens.output) == pytest.approx(best.monthly)


def test_prompts_are_never_free() -> None:
    # On eight B200, decode steps are bound by launching kernels: a mixed step takes no longer for its prompt tokens.
    plan = make_plan(LLAMA_70B, [device("b200")], TEXTBOOK, SLO, Options(tensor_parallel=(1, 8)))
    for one in plan.candidates:
        assert 0.1 < one.prefill_share < 0.9
        assert 0 < one.tokens.input < one.tokens.output


def test_longer_prompts_take_a_larger_share_of_the_bill() -> None:
    shares = []
    for tokens in (500, 2_000, 6_000):
        work = replace(TEXTBOOK, input_tokens=tokens)
        plan = make_plan(LLAMA_70B, [H100], work, Slo(ttft_s=2.0), Options(tensor_parallel=(4,), kv_dtypes=("fp8",)))
        shares.append(require(plan).prefill_share)
    assert shares == sorted(shares) and shares[0] < shares[-1]


def test_break_even_of_a_70b_on_eight_gpus_against_an_api() -> None:
    # One replica on 8 GPUs without a spare: 8 x 730 x 3.00 = 17,520 dollars, people 4,000. The API takes
    # 2,500 x 0.88 / 1M = 0.0022 dollars a request, 0.0669 a month for one request a day. Egress and storage set to 0.
    overheads = Overheads(egress_per_gb=0, storage_per_gb=0)
    options = Options(tensor_parallel=(8,), headroom=Headroom(1.0, 0), overheads=overheads)
    level = replace(TEXTBOOK, curve=CURVES["flat"], peak_factor=1)
    plan = make_plan(LLAMA_70B, [H100], level, SLO, options, API)
    best = require(plan)
    assert best.deployment.devices == 8
    by_hand = (8 * 730 * 3.0 + 4_000) / (0.0022 * 730 / 24)
    assert by_hand == pytest.approx(321_594.0, rel=1e-5)
    # One replica is enough for that many; otherwise the figure by hand would not be the answer.
    assert by_hand / 86_400 < best.most.requests_per_s
    assert plan.api is not None and plan.api.break_even == pytest.approx(by_hand, rel=1e-6)
    assert plan.api.monthly == pytest.approx(66_916.67)
    at_break_even = bills_at(best, level, options, by_hand)[0]
    assert at_break_even == pytest.approx(21_520)


def test_the_curve_to_the_break_even_crosses_where_it_says(textbook: Plan) -> None:
    assert textbook.api is not None
    level = textbook.api.break_even
    for point in textbook.api.curve:
        if level is not None and point.requests_per_day > level * 1.001:
            assert point.static < point.api
    assert textbook.api.curve[0].static > textbook.api.curve[0].api


def test_the_day_follows_the_curve(textbook: Plan) -> None:
    assert [hour.hour for hour in textbook.day] == list(range(24))
    best = require(textbook)
    assert max(hour.devices for hour in textbook.day) == best.fleet.devices
    assert sum(hour.average for hour in textbook.day) * 3_600 == pytest.approx(1e6)
    assert max(hour.peak for hour in textbook.day) == pytest.approx(34.7222, rel=1e-4)


def test_sensitivity_moves_the_bill_the_right_way(textbook: Plan) -> None:
    rows = {row.name: row for row in textbook.sensitivity}
    base = require(textbook).monthly
    for name in ("users a day", "GPU price", "output tokens", "input tokens", "peak factor", "operations"):
        low, high = rows[name].low.monthly, rows[name].high.monthly
        assert low is not None and low <= base
        assert high is None or high >= base
    for name in ("utilisation", "cache hit rate"):
        low, high = rows[name].low.monthly, rows[name].high.monthly
        assert low is None or high is None or low >= high
    price = rows["GPU price"]
    assert price.high.monthly is not None and price.low.monthly is not None
    assert price.high.monthly - price.low.monthly == pytest.approx(require(textbook).static.gpus.dollars)
    swings = [row.swing for row in textbook.sensitivity]
    assert swings == sorted(swings, reverse=True)


def test_a_variant_that_no_longer_fits_has_no_bill() -> None:
    plan = make_plan(LLAMA_70B, [H100], TEXTBOOK, SLO, Options(context=2_500, tensor_parallel=(4,)))
    rows = {row.name: row for row in plan.sensitivity}
    assert rows["input tokens"].high.monthly is None and rows["input tokens"].swing == 0
    shortest = replace(TEXTBOOK, input_tokens=1, output_tokens=1)
    assert make_plan(LLAMA_70B, [H100], shortest, SLO, Options(tensor_parallel=(4,))).sensitivity


def test_more_cache_hits_need_no_more_gpus() -> None:
    def devices_at(hits: float) -> int:
        return require(make_plan(LLAMA_70B, [H100], replace(TEXTBOOK, cache_hit_rate=hits), SLO)).fleet.devices

    assert devices_at(0.8) < devices_at(0.0)


def test_a_mix_of_prices_is_cheaper_than_on_demand(textbook: Plan) -> None:
    mixed = make_plan(LLAMA_70B, [H100], TEXTBOOK, SLO, Options(mix=PriceMix(0.2, 0.5, 0.3)))
    assert require(mixed).monthly < require(textbook).monthly


def test_what_does_not_fit_says_why_and_what_would() -> None:
    small = device("rtx-4090")
    plan = make_plan(LLAMA_70B, [small], TEXTBOOK, SLO, Options(tensor_parallel=(1,), pipeline_parallel=(1,)))
    assert plan.best is None and plan.candidates == () and plan.day == ()
    with pytest.raises(ConfigError, match=r"llama-3.3-70b does not fit: .* of each rtx-4090 .* would do"):
        require(plan)


def test_objectives_that_nothing_keeps_name_the_nearest() -> None:
    plan = make_plan(LLAMA_70B, [H100], TEXTBOOK, Slo(ttft_s=0.001))
    with pytest.raises(ConfigError, match=r"keeps TTFT p95 under 1 ms: the nearest, h100 x.* ms without any other"):
        require(plan)


def test_a_price_that_is_missing_is_said() -> None:
    unsold = replace(H100, prices=Prices(on_demand=3.0))
    plan = make_plan(LLAMA_70B, [unsold], TEXTBOOK, SLO, Options(mix=PriceMix(0.5, 0, 0.5)))
    with pytest.raises(ConfigError, match="no spot price"):
        require(plan)


def test_requests_longer_than_the_models_context_are_refused() -> None:
    short = replace(LLAMA_70B, max_positions=8_192)
    with pytest.raises(ConfigError, match=r"up to 12,000 tokens, answers included, do not fit the context of 8,192"):
        window(short, replace(TEXTBOOK, output_tokens=10_000), None)
    with pytest.raises(ConfigError, match=r"a context of 1,000 tokens is shorter than requests of up to 2,500"):
        window(short, TEXTBOOK, 1_000)
    with pytest.raises(ConfigError, match=r"longer than the 8,192 of "):
        window(short, TEXTBOOK, 10_000)
    assert window(short, TEXTBOOK, None) == 8_192
    assert window(LLAMA_70B, TEXTBOOK, None) == 10_000
    assert window(short, replace(TEXTBOOK, input_tokens=100, output_tokens=100), None) == 4_096


def test_what_is_tried_on_a_device() -> None:
    made = [one for one in deployments(LLAMA_70B, H100, 8_192, Options()) if isinstance(one, Deployment)]
    assert {one.tensor_parallel for one in made} == {1, 2, 4, 8}
    assert {one.weights.name for one in made} == {"bf16", "fp8"}
    assert {one.kv_format for one in made} == {"bf16", "fp8"}
    assert {one.pipeline_parallel for one in made} == {1}
    a100 = [one for one in deployments(LLAMA_70B, device("a100-80"), 8_192, Options()) if isinstance(one, Deployment)]
    assert {one.weights.name for one in a100} == {"bf16", "int8"}


def test_stages_of_a_pipeline_are_tried_where_one_stage_is_too_small() -> None:
    def tried(options: Options) -> set[tuple[int, int]]:
        made = deployments(LLAMA_70B, device("l4"), 8_192, replace(options, weight_dtypes=("fp8",)))
        return {(one.tensor_parallel, one.pipeline_parallel) for one in made if isinstance(one, Deployment)}

    assert tried(Options()) == {(1, 1), (2, 1), (4, 1), (8, 1)}  # eight L4 hold it
    assert tried(Options(tensor_parallel=(2,))) == {(2, 1), (2, 2)}  # two do not, four do
    assert tried(Options(tensor_parallel=(2,), pipeline_parallel=(4,))) == {(2, 4)}


def test_a_layout_that_was_asked_for_and_cannot_be_is_said() -> None:
    plan = make_plan(LLAMA_70B, [H100], TEXTBOOK, SLO, Options(tensor_parallel=(3, 8)))
    assert any(one.kind == "layout" and "cannot split" in one.reason for one in plan.rejected)
    assert require(plan).deployment.tensor_parallel == 8


def test_a_cpu_of_ones_own_costs_nothing_but_people() -> None:
    own = replace(device("cpu-16"), prices=Prices())
    work = Workload(100, 10, 500, 250, curve=CURVES["office"])
    best = require(make_plan(model_shape("smollm2-135m"), [own], work, Slo(ttft_s=2.0), api=API))
    assert best.deployment.devices == 1 and best.static.gpus.dollars == 0
    assert best.monthly == pytest.approx(4_000, rel=0.01)


def test_a_plan_as_json_has_every_figure_and_every_assumption_its_source(textbook: Plan) -> None:
    tree = json.loads(json.dumps(as_tree(textbook), allow_nan=False))
    assert tree["workload"]["peak"]["output_tokens_per_s"] == pytest.approx(17_361.1, rel=1e-5)
    assert tree["best"] == tree["candidates"][0]
    assert tree["best"]["static"]["total"] == require(textbook).static.total
    assert len(tree["day"]) == 24 and len(tree["sensitivity"]) >= 7
    assert all(one["source"] and one["value"] for one in tree["assumptions"])
    told = " ".join(one["what"] for one in tree["assumptions"])
    for word in ("price of h100", "efficiency", "API price", "operations", "egress", "storage", "headroom", "window"):
        assert word in told
    nothing = make_plan(LLAMA_70B, [H100], TEXTBOOK, Slo(ttft_s=0.001))
    assert json.loads(json.dumps(as_tree(nothing), allow_nan=False))["best"] is None


def test_one_rejected_deployment_does_not_hide_the_others(textbook: Plan) -> None:
    assert any(one.kind == "memory" for one in textbook.rejected)
    assert all(isinstance(one, Candidate) for one in textbook.candidates)
    assert all(one.reason for one in textbook.rejected)
