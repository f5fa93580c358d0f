"""Bedrock: signed requests to Converse, answers in binary messages (R-RT-8, R-RT-9)."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.remote import credentials
from penstock.backends.remote.failure import ServerOverloaded
from penstock.backends.remote.server import RemoteServer
from penstock.backends.remote.sigv4 import AwsCredentials, sign
from penstock.backends.remote.upstream import Upstream
from penstock.errors import ConfigError
from penstock.protocol.errors import EngineLost, InvalidRequest
from tests.backends.remote.scripted_server import (
    CONVERSATION,
    TOOLS,
    Asked,
    Reply,
    ask,
    client,
    error,
    message,
    reply_json,
    scripted,
)

BINARY = {"content-type": "application/vnd.amazon.eventstream"}
MODEL = "anthropic.claude-3-haiku-20240307-v1:0"


def delta(index: int, **fields: Any) -> bytes:
    return message({"contentBlockIndex": index, "delta": fields, "p": "abcd"}, event_type="contentBlockDelta")


def ended(reason: str) -> bytes:
    usage = {"inputTokens": 20, "outputTokens": 7, "totalTokens": 27, "cacheReadInputTokens": 4}
    return message({"stopReason": reason}, event_type="messageStop") + message(
        {"usage": usage, "metrics": {"latencyMs": 500}}, event_type="metadata"
    )


BEGIN = message({"role": "assistant"}, event_type="messageStart")
TEXT = BEGIN + delta(0, text="Hé") + delta(0, text="llo 日本") + ended("end_turn")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKID")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def verify(asked: Asked, who: AwsCredentials) -> None:
    """Checks a signature as the service does: from the request as it arrived."""
    found = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=\w+/(\d+)/eu-west-1/bedrock/aws4_request, "
        r"SignedHeaders=([a-z;-]+), Signature=\w+",
        asked.headers["authorization"],
    )
    assert found is not None, asked.headers["authorization"]
    names = found.group(2).split(";")
    assert {"host", "x-amz-date"} <= set(names)
    now = datetime.strptime(asked.headers["x-amz-date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - now).total_seconds()) < 60
    headers = {
        name: asked.headers[name] for name in names if name not in ("host", "x-amz-date", "x-amz-security-token")
    }
    url = f"http://{asked.headers['host']}{asked.target}"
    again = sign(asked.method, url, headers, asked.body, who, region="eu-west-1", service="bedrock", now=now)
    assert again["authorization"] == asked.headers["authorization"]


async def test_a_signed_request_and_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "session")
    parts = [TEXT[at : at + 11] for at in range(0, len(TEXT), 11)]
    async with (
        scripted(Reply(parts, headers=BINARY)) as there,
        client(there, "bedrock", model=MODEL, aws_region="eu-west-1") as server,
    ):
        answer = await ask(
            server, messages=CONVERSATION, tools=TOOLS, tool_choice="required", top_p=0.9, stop="X", max_tokens=50
        )
    assert (answer.text, answer.reason, answer.usage) == ("Héllo 日本", "stop", (24, 7, 4))
    [asked] = there.asked
    assert asked.target == "/model/anthropic.claude-3-haiku-20240307-v1%3A0/converse-stream"
    assert asked.headers["x-amz-security-token"] == "session"
    verify(asked, AwsCredentials("AKID", "secret", "session"))
    sent = asked.json
    assert sent["system"] == [{"text": "Be brief."}]
    assert sent["inferenceConfig"] == {"maxTokens": 50, "topP": 0.9, "stopSequences": ["X"]}
    assert [turn["role"] for turn in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"][1] == {
        "toolUse": {"toolUseId": "c2", "name": "weather", "input": {"city": "Oslo"}}
    }
    assert sent["messages"][2]["content"][0] == {"toolResult": {"toolUseId": "c1", "content": [{"text": "sunny"}]}}
    assert sent["toolConfig"]["toolChoice"] == {"any": {}}
    assert sent["toolConfig"]["tools"][1] == {
        "toolSpec": {"name": "clock", "inputSchema": {"json": {"type": "object"}}}
    }


async def test_parallel_calls_in_fragments_and_thoughts() -> None:
    def begun(index: int, id: str, name: str) -> bytes:
        start = {"toolUse": {"toolUseId": id, "name": name}}
        return message({"contentBlockIndex": index, "start": start}, event_type="contentBlockStart")

    def stop(index: int) -> bytes:
        return message({"contentBlockIndex": index}, event_type="contentBlockStop")

    stream = BEGIN + delta(0, reasoningContent={"text": "Hm."}) + delta(0, reasoningContent={"signature": "s"})
    stream += stop(0) + begun(1, "t1", "weather") + delta(1, toolUse={"input": '{"city": '})
    stream += delta(1, toolUse={"input": '"Rome"}'}) + stop(1) + begun(2, "t2", "clock") + stop(2) + ended("tool_use")
    async with (
        scripted(Reply(stream, headers=BINARY)) as there,
        client(there, "bedrock", aws_region="eu-west-1") as server,
    ):
        answer = await ask(server, tools=TOOLS)
    assert answer.thoughts == "Hm." and answer.reason == "tool_calls"
    assert answer.calls == [("t1", "weather", {"city": "Rome"}), ("t2", "clock", {})]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("throttlingException", ServerOverloaded),
        ("validationException", InvalidRequest),
        ("modelStreamErrorException", EngineLost),
        ("internalServerException", EngineLost),
    ],
)
async def test_an_exception_in_the_middle(kind: str, wanted: type[Exception]) -> None:
    stream = BEGIN + delta(0, text="Hi") + message({"message": "no"}, message_type="exception", exception_type=kind)
    async with (
        scripted(Reply(stream, headers=BINARY)) as there,
        client(there, "bedrock", aws_region="eu-west-1") as server,
    ):
        with pytest.raises(wanted):
            await ask(server)


async def test_an_unmodelled_error_and_a_wrong_checksum() -> None:
    told = message({}, message_type="error", error_code="InternalFailure", error_message="gone")
    for stream in (BEGIN + told, BEGIN + TEXT[:-1] + b"\x00", BEGIN + b"HTTP garbage and more"):
        async with (
            scripted(Reply(stream, headers=BINARY)) as there,
            client(there, "bedrock", aws_region="eu-west-1") as server,
        ):
            with pytest.raises(EngineLost):
                await ask(server)


async def test_refusals_go_by_their_exception() -> None:
    shape = error(400, {"message": "slow down"}, x_amzn_errortype="ThrottlingException:http://internal.amazon.com/")
    async with scripted(shape) as there, client(there, "bedrock", aws_region="eu-west-1") as server:
        with pytest.raises(ServerOverloaded):
            await ask(server)
    wrong = error(400, {"message": "Malformed input"}, x_amzn_errortype="ValidationException")
    async with scripted(wrong) as there, client(there, "bedrock", aws_region="eu-west-1") as server:
        with pytest.raises(InvalidRequest, match="Malformed input"):
            await ask(server)


async def test_tools_that_may_not_be_called() -> None:
    async with (
        scripted(Reply(TEXT, headers=BINARY)) as there,
        client(there, "bedrock", aws_region="eu-west-1") as server,
    ):
        await ask(server, tools=TOOLS, tool_choice="none")
        with pytest.raises(InvalidRequest, match="calls already"):
            await ask(server, messages=CONVERSATION, tools=TOOLS, tool_choice="none")
        assert server.fit({"top_k": 5, "tools": [{"function": {"name": "f", "strict": True}}]}).refused == ("top_k",)
        assert server.fit({"tools": [{"function": {"name": "f", "strict": True}}]}).ignored == ("tools.strict",)
    assert "toolConfig" not in there.asked[0].json


async def test_a_model_that_cannot_stream() -> None:
    use = {"toolUse": {"toolUseId": "t1", "name": "weather", "input": {"city": "Rome"}}}
    thought = {"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": "s"}}}
    body = {
        "output": {"message": {"role": "assistant", "content": [thought, {"text": "Héllo"}, use]}},
        "stopReason": "tool_use",
        "usage": {"inputTokens": 5, "outputTokens": 6, "totalTokens": 11},
    }
    async with (
        scripted(lambda asked: reply_json(body)) as there,
        client(there, "bedrock", aws_region="eu-west-1", streamed=False) as server,
    ):
        answer = await ask(server, tools=TOOLS)
        body["output"] = {"message": {}}
        with pytest.raises(EngineLost):
            await ask(server)
    assert (answer.text, answer.thoughts, answer.reason, answer.usage) == ("Héllo", "Hm.", "tool_calls", (5, 6, 0))
    assert answer.calls == [("t1", "weather", {"city": "Rome"})] and there.asked[0].target == "/model/m/converse"


async def test_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "LOOK_S", 0.0)
    file = tmp_path / "credentials"
    file.write_text("[default]\naws_access_key_id = AKID2\naws_secret_access_key = two\n")
    monkeypatch.setenv("BEDROCK_KEY", "bedrock-api-key-1")

    def script(asked: Asked) -> Reply:
        return reply_json({"inputTokens": 9}) if "count-tokens" in asked.target else Reply(TEXT, headers=BINARY)

    async with (
        scripted(script) as there,
        client(there, "bedrock", aws_region="eu-west-1", key_file=str(file)) as server,
    ):
        assert (await server.count({"messages": CONVERSATION}, "r")).count == 9
        file.write_text("[default]\naws_access_key_id = AKID3\naws_secret_access_key = three\n")
        await ask(server)
        async with client(there, "bedrock", key_env="BEDROCK_KEY") as server:
            await ask(server)
    verify(there.asked[0], AwsCredentials("AKID2", "two"))
    verify(there.asked[1], AwsCredentials("AKID3", "three"))
    assert there.asked[2].headers["authorization"] == "Bearer bedrock-api-key-1"
    with pytest.raises(ConfigError, match="aws_region"):
        await RemoteServer("0", Upstream("http://127.0.0.1:1", "m", dialect="bedrock")).start()
    regional = RemoteServer("0", Upstream("https://bedrock-runtime.ap-south-1.amazonaws.com", "m", dialect="bedrock"))
    await regional.start()
    await regional.close()
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        await RemoteServer("0", Upstream("http://x", "m", dialect="bedrock", aws_region="r")).start()
