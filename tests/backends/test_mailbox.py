"""Deltas wait for one reader, in bounded memory."""

from __future__ import annotations

import asyncio

import pytest

from penstock.backends.mailbox import Mailbox
from penstock.engine.request import Delta, TokenLogprob


async def test_deltas_of_a_choice_merge_while_nobody_reads() -> None:
    mailbox = Mailbox()
    mailbox.put(0, Delta("a", [1], logprobs=[TokenLogprob(-1.0)], cached_tokens=7))
    mailbox.put(1, Delta("b", [9]))
    mailbox.put(0, Delta("a", [2], logprobs=[TokenLogprob(-2.0)]))
    mailbox.put(0, Delta("a", [3], logprobs=[TokenLogprob(-3.0)], finish_reason="length"))
    first, second = await mailbox.take()
    assert (first.index, first.delta.tokens, first.delta.finish_reason) == (0, [1, 2, 3], "length")
    assert first.delta.cached_tokens == 7
    assert [row.logprob for row in first.delta.logprobs or []] == [-1.0, -2.0, -3.0]
    assert (second.index, second.delta.tokens) == (1, [9])


async def test_a_waiting_reader_wakes_for_a_delta_an_error_or_the_time() -> None:
    mailbox = Mailbox()
    assert await mailbox.take(0.01) == []
    task = asyncio.create_task(mailbox.take(5))
    await asyncio.sleep(0)
    mailbox.put(0, Delta("a", [1]))
    assert len(await task) == 1
    task = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    mailbox.fail(ValueError("first"))
    mailbox.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await task


async def test_what_arrived_before_an_error_is_delivered_first() -> None:
    mailbox = Mailbox()
    mailbox.put(0, Delta("a", [1]))
    mailbox.fail(ValueError("gone"))
    assert len(await mailbox.take()) == 1
    with pytest.raises(ValueError, match="gone"):
        await mailbox.take()


async def test_a_cancelled_reader_loses_nothing() -> None:
    mailbox = Mailbox()
    task = asyncio.create_task(mailbox.take())
    await asyncio.sleep(0)
    task.cancel()
    mailbox.put(0, Delta("a", [1]))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(await mailbox.take()) == 1


async def test_a_reader_is_woken_in_time_whatever_it_waited_for_before() -> None:
    mailbox = Mailbox()
    loop = asyncio.get_running_loop()
    mailbox.put(0, Delta("a", [1]))
    assert len(await mailbox.take(0.2)) == 1
    for within in (0.2, 0.02, 0.05):
        task = asyncio.create_task(mailbox.take(0.5))
        await asyncio.sleep(0)
        mailbox.put(0, Delta("a", [2]))
        assert len(await task) == 1
        began = loop.time()
        assert await mailbox.take(within) == []
        assert within - 0.01 <= loop.time() - began < within + 0.3
    mailbox.close()
