"""`penstock keys` and `penstock tenants`: limits of keys and tenants, kept in the store."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from penstock.cli.app import app


def run(store: Path, *words: str) -> str:
    result = CliRunner().invoke(app, [*words, "--set", f"store.url=sqlite:///{store}"], env={"COLUMNS": "200"})
    return result.output if result.exit_code == 0 else f"failed: {result.exception}"


def test_limits_of_tenants_and_keys_are_set_shown_and_taken_away(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    run(store, "tenants", "create", "acme", "--limit", "monthly_budget=500", "--limit", "tokens_per_minute=1000")
    run(store, "tenants", "update", "acme", "--limit", "monthly_budget=none", "--limit", "concurrent_requests=3")
    listed = run(store, "tenants", "list")
    assert "tokens_per_minute=1000 concurrent_requests=3" in listed and "monthly_budget" not in listed
    key = run(store, "keys", "create", "--tenant", "acme", "--limit", "requests_per_minute=30")[:12]
    assert "requests_per_minute=30 daily_budget=2.5" in run(store, "keys", "update", key, "--limit", "daily_budget=2.5")
    assert "daily_budget=2.5" in run(store, "keys", "list")
    assert "none takes" not in run(store, "tenants", "update", "acme", "--limit", "daily_budget=-1")
    for wrong in ("daily_budget=-1", "nothing=1", "daily_budget"):
        assert "--limit" in run(store, "tenants", "update", "acme", "--limit", wrong)


def test_what_tenants_and_keys_may_use(tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    run(store, "tenants", "create", "acme", "--allow", "models=small, auto", "--allow", "tools=")
    run(store, "tenants", "update", "acme", "--allow", "adapters=acme-*", "--allow", "adapters=sql")
    (tenant,) = json.loads(run(store, "tenants", "list", "-o", "json"))
    assert tenant["allow"] == {"models": ["small", "auto"], "adapters": ["acme-*", "sql"], "tools": []}
    assert "tools=nothing" in run(store, "tenants", "list").replace("\n", "")
    run(store, "tenants", "update", "acme", "--allow", "tools=none")
    (tenant,) = json.loads(run(store, "tenants", "list", "-o", "json"))
    assert "tools" not in tenant["allow"]
    key = run(store, "keys", "create", "--tenant", "acme", "--allow", "models=small").splitlines()[0]
    id = key.rpartition("_")[0]
    assert "may use models=small collections=nothing" in run(store, "keys", "update", id, "--allow", "collections=")
    (listed,) = json.loads(run(store, "keys", "list", "-o", "json"))
    assert listed["allow"] == {"models": ["small"], "collections": []}
