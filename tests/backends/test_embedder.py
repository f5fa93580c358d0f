"""The embedder over real ZeroMQ, against the real engine server with the default encoder behind it."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from penstock.backends import embedder as module
from penstock.backends.embedder import Embedder
from penstock.backends.encoder import EncoderBackend
from penstock.backends.encoder_set import EncoderSet
from penstock.backends.native import NativeBackend
from penstock.engine.encoder.request import EncodeRequest, Encoding
from penstock.engine.request import Request, SamplingParams
from penstock.protocol.errors import EngineUnavailable, InvalidRequest, ServerError
from penstock.text.encoder import EncoderText
from tests.gateway.conftest import eventually


def embedder(endpoint: str, **options: object) -> Embedder:
    return Embedder("minilm", "minilm", EncoderBackend(endpoint), **options)  # type: ignore[arg-type]


def test_texts_that_mean_the_same_are_near_and_the_tokens_are_counted(encoder_endpoint: str) -> None:
    async def work() -> None:
        encoder = embedder(encoder_endpoint)
        texts = ["How do I reset my password?", "I forgot my password, what now?", "Bread needs flour and water."]
        found = await encoder.embed(texts)
        assert found.vectors.shape == (3, 384)
        assert np.allclose(np.linalg.norm(found.vectors, axis=1), 1, atol=1e-5)
        likeness = found.vectors @ found.vectors.T
        assert likeness[0, 1] > 0.6 > 0.3 > likeness[0, 2]
        assert found.tokens == [len(ids) for ids in await encoder.tokenize(texts)] == [9, 10, 8]
        many = await asyncio.gather(*(encoder.embed([texts[i % 3]] * (i % 5 + 1)) for i in range(40)))
        for i, each in enumerate(many):
            assert np.allclose(each.vectors, found.vectors[i % 3], atol=1e-5)
        await encoder.close()

    asyncio.run(work())


def test_more_texts_than_one_request_holds_come_back_in_order(encoder_endpoint: str) -> None:
    async def work() -> None:
        encoder = embedder(encoder_endpoint)
        texts = [f"{'very ' * (i % 3)}{i}" for i in range(300)]
        found = await encoder.embed(texts, priority=1)
        alone = await encoder.embed([texts[0], texts[255], texts[256], texts[299]])
        assert np.allclose(found.vectors[[0, 255, 256, 299]], alone.vectors, atol=1e-5)
        long = await encoder.embed(["word " * 1000])
        assert long.tokens == [256]
        await encoder.close()

    asyncio.run(work())


def test_late_interaction_in_the_engine_equals_that_of_the_token_vectors(encoder_endpoint: str) -> None:
    async def work() -> None:
        encoder = embedder(encoder_endpoint)
        query = "What is the capital of France?"
        documents = ["Paris is the capital of France.", "France borders Spain.", "Bananas are yellow.", ""]
        scores = (await encoder.rerank(query, documents)).values
        assert scores == sorted(scores, reverse=True)
        found = await encoder.token_vectors([query, *documents])
        asked, *answers = found.vectors
        assert len(asked) == found.tokens[0] - 2
        expected = [float((asked @ rows.T).max(1).mean()) if len(rows) else 0.0 for rows in answers]
        assert np.allclose(scores, expected, atol=1e-5)
        with pytest.raises(InvalidRequest, match="query is empty"):
            await encoder.rerank("", documents)
        await encoder.close()

    asyncio.run(work())


def test_control_tokens_in_a_text_are_ordinary_text(encoder_endpoint: str) -> None:
    async def work() -> None:
        encoder = embedder(encoder_endpoint)
        (ids,) = await encoder.tokenize(["[SEP] injected [CLS]"])
        assert ids.count(102) == 1 and ids.count(101) == 1
        await encoder.close()

    asyncio.run(work())


def test_an_encoder_that_does_not_run_is_asked_for_and_waited_for(tmp_path: object) -> None:
    async def work() -> None:
        asked: list[str] = []
        encoder = embedder(f"ipc://{tmp_path}/none", ask=asked.append, wait_s=0.05)
        for _ in range(2):
            with pytest.raises(EngineUnavailable, match="not ready yet"):
                await encoder.embed(["hi"])
        assert asked == ["minilm", "minilm"]
        await encoder.close()

    asyncio.run(work())


def test_callers_that_wait_briefly_load_the_tokenizer_once(
    encoder_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, begun, may_end = module._load_text, list[str](), threading.Event()

    def slow(source: str) -> EncoderText:
        begun.append(source)
        assert may_end.wait(60)
        if len(begun) == 1:
            raise OSError("no network")
        return load(source)

    monkeypatch.setattr(module, "_load_text", slow)

    async def work() -> None:
        encoder = embedder(encoder_endpoint)

        async def give_up() -> None:
            waiting, before = asyncio.create_task(encoder.open()), len(begun)
            await eventually(lambda: len(begun) > before or encoder._opening.locked())
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

        await encoder.backend.start()
        encoder._started = True
        await encoder.backend.wait_ready(60)
        for _ in range(3):
            await give_up()
        assert len(begun) == 1
        may_end.set()
        await eventually(lambda: encoder._loading is not None and encoder._loading.done())
        await encoder.open()
        assert len(begun) == 2, "a failure that nobody waited for is not told later"
        assert encoder.text and encoder._loading is None
        await encoder.close()

    asyncio.run(work())


def test_a_tokenizer_that_is_being_loaded_is_let_go_of(encoder_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(module, "_load_text", lambda source: may_end.wait(60))

    async def work() -> None:
        encoder = embedder(encoder_endpoint)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(encoder.open(), 0.3)
        await encoder.close()
        may_end.set()

    asyncio.run(work())


def test_a_refused_request_and_one_of_the_wrong_kind_say_why(encoder_endpoint: str) -> None:
    async def work() -> None:
        backend = EncoderBackend(encoder_endpoint)
        await backend.start()
        await backend.wait_ready(60)
        with pytest.raises(ServerError, match="vocabulary"):
            await backend.encode(EncodeRequest("x", [[99_999_999]]))
        assert backend.in_flight == 0
        await backend.close()
        plain = NativeBackend(encoder_endpoint)
        await plain.start()
        await plain.wait_ready(60)
        with pytest.raises(ServerError, match="does not generate"):
            async for _ in plain.generate(Request("r", [1], SamplingParams())):
                pass
        await plain.close()

    asyncio.run(work())


def test_both_vectors_at_once_are_the_same_as_each_by_itself(encoder_endpoint: str) -> None:
    async def work() -> None:
        encoder = embedder(encoder_endpoint)
        texts = ["One text.", "Another one, somewhat longer.", "", "word " * 400]
        whole, tokens = await encoder.embed_tokens(texts)
        assert np.allclose(whole.vectors, (await encoder.embed(texts)).vectors, atol=1e-5)
        alone = await encoder.token_vectors(texts)
        assert tokens.tokens == alone.tokens and len(encoder.text.spelled(texts[:1])[0]) == len(tokens.vectors[0]) == 3
        for one, other in zip(tokens.vectors, alone.vectors, strict=True):
            assert one.shape == other.shape and np.allclose(one, other, atol=1e-5)
        await encoder.close()

    asyncio.run(work())


def test_engines_of_a_fleet_share_the_texts_and_one_that_is_lost_loses_none(encoder_endpoint: str) -> None:
    async def work() -> None:
        engines = EncoderSet()
        encoder = Embedder("minilm", "minilm", engines, wait_s=60)
        late = asyncio.create_task(encoder.embed(["One text."]))
        await asyncio.sleep(0.05)
        assert not engines.ready and not late.done(), "it waits for the first engine"
        names = ("a.1", "b.1")
        await engines.follow({name: lambda: EncoderBackend(encoder_endpoint) for name in names})
        first = (await late).vectors
        for member in engines.members:
            await member.wait_ready(60)
        lost = engines.members[0]
        encode = lost.encode

        async def dies(request: EncodeRequest) -> Encoding:
            await encode(request)
            raise EngineUnavailable("The engine stopped.")

        lost.encode = dies  # type: ignore[method-assign]
        again = [(await encoder.embed(["One text."])).vectors for _ in range(3)]
        assert all(np.array_equal(first, found) for found in again)
        await engines.follow({"b.1": lambda: EncoderBackend(encoder_endpoint)})
        assert len(engines.members) == 1
        await engines.follow({})
        encoder.wait_s = 0.05
        with pytest.raises(EngineUnavailable, match="not ready yet"):
            await encoder.embed(["One text."])
        await encoder.close()

    asyncio.run(work())
