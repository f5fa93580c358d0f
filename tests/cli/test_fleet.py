"""`penstock join` and `penstock fleet`: what is refused, and why."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.cli.command import penstock


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["http://there:6379"], "redis://HOST:PORT joins a fleet"),
        (["redis://127.0.0.1:1", "--once"], "--once is for ranks"),
        (["redis://127.0.0.1:1", "--replicas", "2"], "--replicas needs --model"),
        (["tcp://127.0.0.1:1", "--as", "b", "--label", "spot"], "--label is for a fleet"),
        (["tcp://127.0.0.1:1"], "--as NAME is needed"),
        (["redis://127.0.0.1:1", "--as", "b"], "a fleet needs a secret"),
    ],
)
def test_what_join_refuses(arguments: list[str], why: str, tmp_path: Path) -> None:
    outcome = penstock("join", *arguments, cwd=tmp_path)
    assert outcome.returncode != 0 and why in " ".join(outcome.stderr.split())


def test_a_secret_is_written_once_and_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "fleet.secret"
    assert penstock("fleet", "secret", str(file)).returncode == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and len(file.read_text().strip()) >= 32
    again = penstock("fleet", "secret", str(file))
    assert again.returncode != 0 and "exists" in again.stderr


@pytest.mark.slow
def test_a_fleet_that_does_not_answer_is_named(tmp_path: Path) -> None:
    file = tmp_path / "fleet.secret"
    penstock("fleet", "secret", str(file))
    asked = ("fleet", "status", "--url", "redis://127.0.0.1:1", "--secret-file", str(file))
    outcome = penstock(*asked, cwd=tmp_path)
    assert outcome.returncode != 0 and "127.0.0.1:1" in outcome.stderr
    assert "which fleet?" in penstock("fleet", "status", cwd=tmp_path).stderr


@pytest.mark.slow
def test_settings_of_one_machine_are_refused_in_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text(
        "server: {loaded_models: models.json}\nfleet: {url: 'redis://127.0.0.1:1'}\n"
    )
    file = tmp_path / "fleet.secret"
    penstock("fleet", "secret", str(file))
    outcome = penstock("fleet", "apply", "--secret-file", str(file), cwd=tmp_path)
    assert outcome.returncode != 0 and "loaded_models" in outcome.stderr
