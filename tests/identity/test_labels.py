"""Labels and demands: what is demanded only narrows, and a label that is missing meets nothing."""

import pytest

from penstock.config.load import load
from penstock.errors import ConfigError
from penstock.identity.labels import (
    NO_DEMAND,
    OF_OWN,
    OF_REMOTES,
    Demand,
    LabelError,
    Labels,
    demand_of,
    parse_demand,
    read_demand,
    stored_demand,
)


def test_a_demand_is_met_by_labels_that_have_every_value() -> None:
    demand = parse_demand("region=eu|ch, External = FALSE", "x-penstock-require")
    assert str(demand) == "region=eu|ch, external=false"
    assert not demand.unmet({"region": "ch", "external": "false", "more": "yes"})
    assert [one.label for one in demand.unmet({"region": "us", "external": "false"})] == ["region"]
    assert [one.label for one in demand.unmet({})] == ["region", "external"], "a label that is missing meets nothing"
    assert demand.why(demand.unmet({"region": "eu"})) == "x-penstock-require requires external=false"


def test_a_demand_can_only_be_narrowed() -> None:
    tenant = demand_of({"region": ["eu", "ch"]}.items(), "tenant acme")
    request = parse_demand("region=ch|us", "x-penstock-require")
    both = tenant.narrowed(request)
    assert both.permitted("region") == ("ch",)
    assert not both.unmet({"region": "ch"})
    assert [one.rule for one in both.unmet({"region": "us"})] == ["tenant acme"]
    nothing = both.narrowed(parse_demand("region=eu", "key"))
    assert nothing.permitted("region") == ()
    for region in ("eu", "ch", "us"):
        assert nothing.unmet({"region": region})
    assert both.narrowed(NO_DEMAND) is both and NO_DEMAND.narrowed(both) is both
    assert tenant.narrowed(tenant) == tenant


@pytest.mark.parametrize(
    "text", ["", "region", "region=", "=eu", "region=eu,", "region=eu;external=false", "re gion=eu", "region=a b",
             "region=eu|", "region=\u00e9", ",".join(f"l{n}=1" for n in range(40)), "x" * 70 + "=1"],
)  # fmt: skip
def test_a_malformed_demand_is_an_error(text: str) -> None:
    with pytest.raises(LabelError):
        parse_demand(text, "x")


def test_demands_are_stored_and_read_back() -> None:
    demand = demand_of({"region": ["eu", "ch"], "external": False}.items(), "tenant acme")
    assert read_demand(stored_demand(demand), "tenant acme") == demand
    assert stored_demand(Demand()) == "" and read_demand("", "x") is NO_DEMAND


def test_labels_of_what_runs_here_and_elsewhere() -> None:
    assert Labels({"region": "eu"}).over(OF_REMOTES) == {"region": "eu", "external": "true"}
    assert Labels({"external": "false"}).over(OF_REMOTES) == OF_OWN
    assert len({Labels({"a": "1"}), Labels({"a": "1"})}) == 1


def test_labels_in_the_configuration(tmp_path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "models:\n- source: smollm2-135m\n  labels: {region: eu}\n"
        "remotes:\n- {model: m, urls: ['http://h/v1'], labels: {external: false, zone: 3}}\n"
        "tiers:\n- {name: standard, require: {region: [eu, ch], external: false}}\n"
    )
    config = load(file, environ={})
    assert config.models[0].labels == (("region", "eu"),)
    assert config.remotes[0].labels == (("external", "false"), ("zone", "3"))
    assert config.tiers[0].require == (("region", "eu|ch"), ("external", "false"))


@pytest.mark.parametrize("labels", ["[eu]", "{Region: eu}", "{region: [eu, us]}", "{region: }", "{region: 'a b'}"])
def test_wrong_labels_are_named(tmp_path, labels: str) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(f"models:\n- source: smollm2-135m\n  labels: {labels}\n")
    with pytest.raises(ConfigError, match=r"models\[0\].labels"):
        load(file, environ={})
