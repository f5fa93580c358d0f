"""Keys come from the environment or a file, follow rotation, and are never shown (R-RT-8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.remote import credentials
from penstock.backends.remote.credentials import Key
from penstock.errors import ConfigError


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "LOOK_S", 0.0)
    file = tmp_path / "key"
    file.write_text("first\n")
    key = Key(file=str(file))
    key.check()
    assert key.value() == "first"
    (tmp_path / "next").write_text("second key")
    (tmp_path / "next").replace(file)
    assert key.value() == "second key"
    file.unlink()
    assert key.value() == "second key", "while it is away the last one is used"
    file.write_text("")
    assert key.value() == "second key"
    assert "second" not in repr(key)


def test_a_missing_key_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="key_file of http://x"):
        Key(file=str(tmp_path / "none"), where="http://x").check()
    with pytest.raises(ConfigError, match="NO_KEY_HERE"):
        Key("NO_KEY_HERE", where="http://x").check()
    for odd in ("ключ", "a\nb"):
        monkeypatch.setenv("NO_KEY_HERE", odd)
        with pytest.raises(ConfigError, match="characters"):
            Key("NO_KEY_HERE", where="http://x").check()
    monkeypatch.setenv("NO_KEY_HERE", " one\n")
    key = Key("NO_KEY_HERE")
    key.check()
    assert key.value() == "one" and Key().value() == ""
    monkeypatch.setenv("NO_KEY_HERE", "two")
    assert key.value() == "two" and "two" not in repr(key)
