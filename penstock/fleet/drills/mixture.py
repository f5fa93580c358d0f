"""What a soak adds to the streams and conversations of a drill: clients that leave, that send nonsense, that read
slowly, embeddings and batches."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import httpx

from penstock.fleet.drills.accounting import Attempt, Losses, Usage
from penstock.fleet.drills.client import check_alive, lines
from penstock.fleet.drills.program import DrillError

EMBED = "The river is high."
LINES = 4
_POLL_S, _BATCH_S = 1.0, 300.0
_NONSENSE: tuple[tuple[str, Any], ...] = (
    ("/v1/chat/completions", b"{not json"),
    ("/v1/chat/completions", {"model": "MODEL", "messages": []}),
    ("/v1/chat/completions", {"model": "nobody", "messages": [{"role": "user", "content": "x"}]}),
    ("/v1/chat/completions", {"model": "MODEL", "messages": [{"role": "user", "content": "x"}], "max_tokens": -1}),
    ("/v1/chat/completions", {"model": "MODEL", "messages": [{"role": "user", "content": "x" * 100_000}]}),
    ("/v1/completions", {"model": "MODEL", "prompt": [99_999_999]}),
    ("/v1/completions", {"model": "MODEL", "prompt": "x", "temperature": "hot"}),
    ("/v1/responses", {"model": "MODEL", "input": "x", "previous_response_id": "resp_nobody"}),
    ("/v1/nothing", {}),
)


class Mixture:
    """`losses` gets what went wrong, `counts` how often each thing was done."""

    def __init__(self, urls: Sequence[str], key: str, batch_key: str, model: str, encoder: str, prefix: str) -> None:
        self.losses = Losses()
        self.counts: Counter[str] = Counter()
        self.attempts: list[Attempt] = []
        self.batch_usage: list[Usage] = []
        self._urls, self._key, self._batch_key, self._model, self._prefix = urls, key, batch_key, model, prefix
        self._encoder = encoder
        self._vector: list[float] | None = None
        self._random = random.Random(prefix)
        self._stop = asyncio.Event()
        self._http = httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None), verify=False)
        self._tasks: list[asyncio.Task[None]] = []
        self._number = 0

    def start(self) -> None:
        kinds: list[tuple[Callable[[], Awaitable[None]], float]] = [
            (self._leave, 0.5), (self._nonsense, 0.5), (self._read_slowly, 2.0), (self._batch, 10.0)
        ]  # fmt: skip
        if self._encoder:
            kinds.append((self._embed, 1.0))
        self._tasks = [asyncio.create_task(self._again(kind, pause)) for kind, pause in kinds]

    def check_alive(self) -> None:
        """See `Load.check_alive`."""
        check_alive(self._tasks)

    async def stop(self) -> None:
        self._stop.set()
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def _again(self, kind: Callable[[], Awaitable[None]], pause: float) -> None:
        while not self._stop.is_set():
            try:
                await kind()
            except httpx.HTTPError as error:
                self.losses.other.append(f"{kind.__name__.strip('_')}: {error!r}")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause * self._random.uniform(0.5, 1.5))

    def _request(self, kind: str, most: int, **more: Any) -> tuple[Attempt, str, dict[str, str]]:
        self._number += 1
        attempt = Attempt(f"{self._prefix}-{kind}-{self._number}", most, sent=1, **more)
        self.attempts.append(attempt)
        headers = {"authorization": f"Bearer {self._key}", "x-request-id": attempt.request_id}
        return attempt, self._random.choice(self._urls), headers

    def _body(self, tokens: int) -> dict[str, Any]:
        message = {"role": "user", "content": f"Say {self._random.randrange(1000)} words."}
        return {"model": self._model, "messages": [message], "max_tokens": tokens, "ignore_eos": True, "stream": True}

    async def _leave(self) -> None:
        """Reads a few tokens, or none, and hangs up."""
        attempt, url, headers = self._request("leave", 200)
        most = self._random.choice((0, 1, 5, 50))
        async with self._http.stream(
            "POST", f"{url}/v1/chat/completions", json=self._body(200), headers=headers
        ) as got:
            async for line in lines(got):
                if attempt.received >= most:
                    break
                if line.startswith(b"data: {"):
                    choices = json.loads(line[6:]).get("choices") or [{"delta": {}}]
                    attempt.received += bool(choices[0]["delta"].get("content"))
        self.counts["clients that left"] += 1

    async def _read_slowly(self) -> None:
        attempt, url, headers = self._request("slow", 200)
        body = {**self._body(200), "stream_options": {"include_usage": True}}
        async with self._http.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers) as got:
            ended = False
            async for line in lines(got):
                await asyncio.sleep(0.05)
                ended = ended or line == b"data: [DONE]"
                if line.startswith(b"data: {") and (told := json.loads(line[6:]).get("usage")):
                    attempt.usage = Usage(told["prompt_tokens"], told["completion_tokens"])
        if not ended:
            self.losses.streams.append("a slow reader's stream did not end")
        self.counts["slow readers"] += 1

    async def _nonsense(self) -> None:
        path, body = self._random.choice(_NONSENSE)
        _, url, headers = self._request("nonsense", 0, priced=False)
        content = body if isinstance(body, bytes) else json.dumps(body).replace("MODEL", self._model).encode()
        got = await self._http.post(
            f"{url}{path}", content=content, headers={**headers, "content-type": "application/json"}
        )
        if not 400 <= got.status_code < 500:
            self.losses.other.append(f"nonsense to {path} is a {got.status_code}: {got.text[:200]}")
        self.counts["bad requests"] += 1

    async def _embed(self) -> None:
        attempt, url, headers = self._request("embed", 0, priced=False)
        body = {"model": self._encoder, "input": EMBED}
        got = await self._http.post(f"{url}/v1/embeddings", json=body, headers=headers)
        if got.status_code != 200:
            self.losses.other.append(f"an embedding is a {got.status_code}: {got.text[:200]}")
            return
        answer = got.json()
        vector = answer["data"][0]["embedding"]
        attempt.usage = Usage(answer["usage"]["prompt_tokens"], 0)
        self._vector = self._vector or vector
        if max(abs(a - b) for a, b in zip(vector, self._vector, strict=True)) > 1e-4:
            self.losses.other.append("the same text has another vector")
        self.counts["embeddings"] += 1

    async def _batch(self) -> None:
        """From the upload to the last line of its result."""
        url, headers = self._random.choice(self._urls), {"authorization": f"Bearer {self._batch_key}"}
        body = {"model": self._model, "messages": [{"role": "user", "content": "A line."}], "max_tokens": 10}
        line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
        text = "".join(json.dumps({"custom_id": str(number), **line}) + "\n" for number in range(LINES))
        file = {"file": ("lines.jsonl", text.encode())}
        kept = _json(await self._http.post(f"{url}/v1/files", files=file, data={"purpose": "batch"}, headers=headers))
        order = {"input_file_id": kept["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = _json(await self._http.post(f"{url}/v1/batches", json=order, headers=headers))
        deadline = time.monotonic() + _BATCH_S
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            if time.monotonic() > deadline:
                self.losses.other.append(f"a batch is {batch['status']} after {_BATCH_S:.0f} s")
                return
            await asyncio.sleep(_POLL_S)
            batch = _json(await self._http.get(f"{url}/v1/batches/{batch['id']}", headers=headers))
        if batch["status"] != "completed":
            self.losses.other.append(f"a batch is {batch['status']}: {batch.get('errors')}")
            return
        output = await self._http.get(f"{url}/v1/files/{batch['output_file_id']}/content", headers=headers)
        # Not `splitlines`: an answer may contain other separators, such as U+2028.
        lines = [line for line in output.text.split("\n") if line]
        answers = [json.loads(line)["response"]["body"]["usage"] for line in lines]
        if len(answers) != LINES:
            self.losses.other.append(f"a batch of {LINES} lines has {len(answers)} answers")
        self.batch_usage += [Usage(told["prompt_tokens"], told["completion_tokens"]) for told in answers]
        for id in (kept["id"], batch["output_file_id"]):
            await self._http.delete(f"{url}/v1/files/{id}", headers=headers)
        self.counts["batches"] += 1


def _json(reply: httpx.Response) -> dict[str, Any]:
    if reply.status_code >= 300:
        raise DrillError(f"{reply.request.url}: {reply.status_code} {reply.text[:300]}")
    found: dict[str, Any] = reply.json()
    return found
