"""Signatures equal those of the test suite that Amazon publishes (R-RT-8)."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from penstock.backends.remote.sigv4 import AwsCredentials, from_profile, sign

NOW = datetime(2015, 8, 30, 12, 36, tzinfo=UTC)
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = (
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwthAx"
    "7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAkiY9q"
    "6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
)
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "token", "signature"),
    [
        ("GET", "/", {}, b"", "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("GET", "/?Param2=value2&Param1=value1", {}, b"", "",
         "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"),
        ("GET", "/ሴ", {}, b"", "", "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85"),
        ("GET", "/example/..", {}, b"", "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("POST", "/", {}, b"", "", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
        ("POST", "/", FORM, b"Param1=value1", "", "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"),
        ("POST", "/", {}, b"", TOKEN, "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead"),
    ],
)  # fmt: skip
def test_published_signatures(
    method: str, path: str, headers: dict[str, str], body: bytes, token: str, signature: str
) -> None:
    who = AwsCredentials("AKIDEXAMPLE", SECRET, token)
    url = f"https://example.amazonaws.com{path}"
    found = sign(method, url, headers, body, who, region="us-east-1", service="service", now=NOW)
    assert found["authorization"].startswith(
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, SignedHeaders="
    )
    assert found["authorization"].endswith(f"Signature={signature}")
    assert found["x-amz-date"] == "20150830T123600Z" and found.get("x-amz-security-token", "") == token


def test_secrets_are_not_shown() -> None:
    who = AwsCredentials("AKIDEXAMPLE", SECRET, TOKEN)
    assert SECRET not in repr(who) and TOKEN not in repr(who)
    found = sign("GET", "https://a.b/", {}, b"", who, region="r", service="s", now=NOW)
    assert SECRET not in str(found)


def test_a_shared_credentials_file(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "[default]\naws_access_key_id = a\naws_secret_access_key = b\n[other]\naws_access_key_id = c\n"
    text += "aws_secret_access_key = d\naws_session_token = e%f\n"
    assert from_profile(text) == AwsCredentials("a", "b")
    monkeypatch.setenv("AWS_PROFILE", "other")
    assert from_profile(text) == AwsCredentials("c", "d", "e%f")
    monkeypatch.setenv("AWS_PROFILE", "none")
    assert from_profile(text) is None and from_profile("garbage") is None
