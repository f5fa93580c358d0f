"""Sampled answers are graded by a model behind the clients' backs; grades are metrics, per model and route."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from penstock.config.context import JudgeConfig
from penstock.config.routing import RouteConfig
from penstock.engine.request import Request
from penstock.gateway.quality.judge import PRIORITY, SAMPLES, Judge, NoJudge
from penstock.text import TextModel
from tests.gateway.conftest import Running, Serving, eventually
from tests.scripted import ScriptedEngine

LABELS = '{model_name="tiny",route="%s"}'


class Grader:
    """Answers questions, and gives `grade` for whatever it is to grade."""

    def __init__(self, text: TextModel, grade: str = "yes") -> None:
        self.text = text
        self.grade = grade
        self.asked: list[str] = []
        self.engine = ScriptedEngine(text, self.reply, max_model_len=2048)

    def reply(self, request: Request) -> list[int]:
        words = self.text.decode(request.prompt, skip_special=False)
        said = "Paris [2]."
        if "You check answers" in words:
            assert request.priority == PRIORITY and request.params.grammar and request.params.temperature == 1
            self.asked.append(words)
            said = self.grade
        return [*self.text.encode(said), self.text.eos_token_ids[0]]


async def judged(running: Running, route: str, outcome: str = "judged") -> float:
    try:
        return await running.metric(
            f'penstock_judged_answers_total{{model_name="tiny",route="{route}",outcome="{outcome}"}}'
        )
    except KeyError:
        return 0


async def until_judged(running: Running, route: str, times: int) -> None:
    for _ in range(6000):
        if await judged(running, route) >= times:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing was judged")


async def test_answers_are_graded_per_model_and_route(serving: Serving, text: TextModel) -> None:
    grader = Grader(text)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    async with serving(grader.engine, judge=JudgeConfig(rate=1.0)) as running:
        for stream in (False, True):
            reply = await running.chat(messages=question, stream=stream)
            assert reply.status_code == 200
        await running.chat(messages=question, model="small")
        await until_judged(running, "direct", 2)
        await until_judged(running, "alias", 1)
        assert all(timeline.texts is None for timeline in running.parts.tracing.recent._kept), "nothing is recorded"
        assert "What is the capital of France?" in grader.asked[0] and "Paris [2]." in grader.asked[0]
        assert await running.metric("penstock_answer_relevance_sum" + LABELS % "direct") == 2
        assert await running.metric("penstock_answer_relevance_count" + LABELS % "direct") == 2
        assert await running.metric("penstock_answer_relevance_count" + LABELS % "alias") == 1


async def test_grades_and_votes_know_the_route_and_its_arm_but_not_the_explanation(
    serving: Serving, text: TextModel, tmp_path: Path
) -> None:
    routes = (
        RouteConfig(name="auto", small="tiny", large="small"),
        RouteConfig(name="held", small="tiny", large="small", share=0),
    )
    store = f"sqlite:///{tmp_path / 'store.db'}"
    async with serving(Grader(text).engine, judge=JudgeConfig(rate=1.0), routes=routes, store_url=store) as running:
        for route, arm in (("auto", "routed"), ("held", "control")):
            answers = [
                await running.chat(model=route, messages=[{"role": "user", "content": content}])
                for content in ("hi", "Prove that 2 is prime, step by step, and write the code for it in Rust.")
            ]
            assert len({answer.headers["x-penstock-route"] for answer in answers}) == (2 if arm == "routed" else 1)
            for answer in answers:
                vote = {"response_id": answer.json()["id"], "rating": "up"}
                voted = (await running.client.post("/v1/feedback", json=vote)).json()
                assert (voted["via"], voted["arm"]) == (route, arm)
            await until_judged(running, route, 2)
            labels = f'endpoint="/v1/chat/completions",route="{route}",arm="{arm}",rating="up"'
            assert await running.metric(f'penstock_feedback_total{{model_name="tiny",{labels}}}') == 2
        totals = (await running.client.get("/v1/admin/feedback?arm=control")).json()["totals"]
        assert [(total["via"], total["up"]) for total in totals] == [("held", 2)]


async def test_groundedness_is_graded_against_the_sources(serving: Serving, text: TextModel) -> None:
    grader = Grader(text, "no")
    async with serving(grader.engine, judge=JudgeConfig(rate=1.0)) as running:
        judge = running.parts.judge
        assert isinstance(judge, Judge)
        submit = judge.submit
        texts = {1: "Rome is in Italy.", 2: "Paris is in France."}

        def with_sources(attempt: Any, generation: Any) -> None:
            generation.sources = SimpleNamespace(texts=lambda: texts)
            submit(attempt, generation)

        judge.submit = with_sources  # type: ignore[method-assign, assignment]
        await running.chat()
        await until_judged(running, "direct", 1)
        assert "[2] Paris is in France." in grader.asked[-1]
        assert "Rome" not in grader.asked[-1], "only what the answer cites"
        assert await running.metric("penstock_answer_groundedness_sum" + LABELS % "direct") == 0
        assert await running.metric("penstock_answer_groundedness_count" + LABELS % "direct") == 1


async def test_clients_do_not_wait_for_it_and_what_is_too_much_is_dropped(serving: Serving, text: TextModel) -> None:
    grader = Grader(text)
    async with serving(grader.engine, judge=JudgeConfig(rate=1.0, queue=2)) as running:
        judge = running.parts.judge
        assert isinstance(judge, Judge) and judge._task is not None
        await judge.close()
        for _ in range(5):
            assert (await running.chat()).status_code == 200
        assert await judged(running, "direct", "dropped") == 3
        judge.start()
        await until_judged(running, "direct", 2)


async def test_a_judge_that_fails_hurts_nobody(serving: Serving, text: TextModel) -> None:
    grader = Grader(text, "maybe")
    async with serving(grader.engine, judge=JudgeConfig(rate=1.0)) as running:
        await running.chat()
        for _ in range(6000):
            if await judged(running, "direct", "failed"):
                break
            await asyncio.sleep(0.01)
        grader.grade = "no"
        await running.chat()
        await until_judged(running, "direct", 1)


async def test_the_rate_says_how_many(serving: Serving, text: TextModel) -> None:
    grader = Grader(text)
    async with serving(grader.engine, judge=JudgeConfig(rate=0.25)) as running:
        draws = iter([0.1, 0.3, 0.9, 0.2])
        assert isinstance(running.parts.judge, Judge)
        running.parts.judge._draw = lambda: next(draws)
        for _ in range(4):
            await running.chat()
        await until_judged(running, "direct", 2)
        assert len(grader.asked) == 2 * SAMPLES
    async with serving(Grader(text).engine) as running:
        assert isinstance(running.parts.judge, NoJudge)
        await running.chat()
        await eventually(lambda: True)
        assert len(running.engine.seen) == 1
