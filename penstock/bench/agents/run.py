"""The settings of `penstock bench agents`, and a run of it: on a server that is there, or one that is started."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.bench import report
from penstock.bench.agents import view
from penstock.bench.agents.figures import Goals, figures
from penstock.bench.agents.history import Api, Histories
from penstock.bench.agents.load import Agents, Progress, Tally
from penstock.bench.agents.plan import Conversation, Growth, plan
from penstock.bench.load import find_model, run_loop
from penstock.bench.wire import Target
from penstock.errors import PenstockError

_LINE_S = 10.0
"""How often a run tells how far it is, where no terminal shows a bar."""
_SHORT = Growth(turns=1, tokens=40, output_len=8, pause=(0.0, 0.0))
"""Of the conversations that warm up."""


@dataclass(frozen=True, slots=True)
class OwnServer:
    """A server that the benchmark starts."""

    model: str = "smollm2-135m"
    shape: str | None = None
    """Random weights instead of a model."""
    device: str = "auto"
    settings: tuple[str, ...] = ()
    """`key=value`."""


@dataclass(frozen=True, slots=True)
class AgentsBenchSettings:
    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    """The first of `/v1/models` when not set."""
    concurrency: int = 64
    """Conversations at once."""
    conversations: int | None = None
    """In all; `concurrency` when not set."""
    growth: Growth = field(default_factory=Growth)
    shared_len: int = 0
    """Tokens at the beginning that all conversations share, a system prompt."""
    api: Api = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    session_header: str | None = None
    """Has the session's key too, beside `prompt_cache_key`."""
    seed: int = 0
    warm_up: int | None = None
    """Short requests before the clock starts; as many as `concurrency` when not set."""
    timeout_s: float = 300.0
    """Of one turn."""
    vocab_size: int | None = None
    seconds: float | None = None
    """No turn is sent later than this; None: all are sent."""
    goals: Goals = field(default_factory=Goals)

    def plan(self) -> list[Conversation]:
        conversations = plan(self.growth, self.conversations or self.concurrency, self.seed)
        least = min(conversation.turns[0].prompt_len for conversation in conversations)
        if self.shared_len >= least:
            raise PenstockError(
                f"first prompts have {least:,} tokens or more, too few for the {self.shared_len:,} that all share; "
                "pass a larger --first-len"
            )
        return conversations

    def describe(self) -> str:
        growth, (low, high) = self.growth, (pause / self.growth.speed for pause in self.growth.pause)
        count = self.conversations or self.concurrency
        all_at_once = f"{count} conversations at once"
        return (
            f"{all_at_once if count <= self.concurrency else f'{count} conversations, {self.concurrency} at once'}, "
            f"{growth.turns} turns to {growth.tokens:,} tokens, tools of {low:g} to {high:g} s"
        )


async def measure(settings: AgentsBenchSettings, api_key: str | None, console: Console) -> tuple[str, Tally]:
    """Run what is planned: the model's name, and what became of it."""
    conversations = settings.plan()
    target = Target.parse(settings.url, api_key)
    found = await find_model(target, settings.model, settings.vocab_size)
    longest = max(conversation.length for conversation in conversations)
    if found.context_window is not None and found.context_window < longest:
        raise PenstockError(
            f"the context window of {found.name} is {found.context_window:,} tokens, too small for conversations of "
            f"{longest:,}; pass a smaller --tokens"
        )

    def agents(shared_len: int) -> Agents:
        return Agents(
            target,
            found.name,
            Histories(settings.api, found.vocab_size, shared_len, settings.seed),
            temperature=settings.temperature,
            ignore_eos=settings.ignore_eos,
            session_header=settings.session_header,
            timeout_s=settings.timeout_s,
        )

    warm_up = settings.concurrency if settings.warm_up is None else settings.warm_up
    with report.progress_bar(console) as bar:
        if warm_up:
            task = bar.add_task("warm-up", total=warm_up)
            short = plan(_SHORT, warm_up, settings.seed + 1_000_003)
            before = await agents(0).run(
                short, settings.concurrency, lambda progress: bar.update(task, completed=progress.done)
            )
            if before.errors and not before.turns:
                raise PenstockError(f"every warm-up request failed: {next(iter(before.errors))}")
            bar.remove_task(task)
        planned = sum(len(conversation.turns) for conversation in conversations)
        running, line_at = bar.add_task(found.name, total=planned), time.monotonic() + _LINE_S

        def told(progress: Progress) -> None:
            nonlocal line_at
            bar.update(running, completed=progress.done, description=f"{found.name}, turns: {progress}")
            if not console.is_terminal and time.monotonic() >= line_at:
                line_at = time.monotonic() + _LINE_S
                console.print(view.so_far(progress, planned), highlight=False, soft_wrap=True)

        with _ended_early(settings.seconds) as over:
            return found.name, await agents(settings.shared_len).run(conversations, settings.concurrency, told, over)


@contextmanager
def _ended_early(seconds: float | None) -> Iterator[asyncio.Event]:
    """Set after so many seconds, or by a signal to stop; a second one stops at once."""
    over, loop = asyncio.Event(), asyncio.get_running_loop()
    timer = None if seconds is None else loop.call_later(seconds, over.set)
    before: dict[signal.Signals, Any] = {}

    def let_go() -> None:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
        before.clear()

    def asked() -> None:
        over.set()
        let_go()

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.getsignal(number) or signal.SIG_DFL
            loop.add_signal_handler(number, asked)
    try:
        yield over
    finally:
        if timer is not None:
            timer.cancel()
        let_go()


def main(
    settings: AgentsBenchSettings,
    own: OwnServer | None,
    api_key: str | None,
    json_file: Path | None,
    html_file: Path | None,
    console: Console,
) -> bool:
    """Runs, prints, and says whether every turn that was sent succeeded and the goals were met. `own`: on a server that
    is started for it."""
    conversations = settings.plan()  # before anything is started
    console.print(forecast(settings, conversations), highlight=False, soft_wrap=True)
    if own is None:
        name, tally = run_loop(measure(settings, api_key, console))
    else:
        with _started(own, console) as url:
            settings = dataclasses.replace(settings, url=url)
            name, tally = run_loop(measure(settings, api_key, console))
    results = figures(tally, settings.growth.turns)
    notes, verdicts = warnings(settings, results), settings.goals.verdicts(results)
    title = f"{name} at {settings.url}: {settings.describe()}"
    console.print(title, style="bold", highlight=False)
    view.show(results, notes, console, verdicts)
    if json_file is not None:
        facts = dataclasses.asdict(settings) | {"model": name, "server": own and dataclasses.asdict(own)}
        said = {"verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}
        report.write_json(json_file, "agents", facts, results | said)
    if html_file is not None:
        report.write_text(html_file, view.render(title, results, notes, verdicts))
        console.print(f"Report: {html_file}", highlight=False)
    return not tally.errors and all(verdict.met for verdict in verdicts)


def forecast(settings: AgentsBenchSettings, conversations: Sequence[Conversation]) -> str:
    """What can be known before the run."""
    tools = [sum(turn.pause_s for turn in conversation.turns) for conversation in conversations]
    prompts = [turn for conversation in conversations for turn in conversation.turns]
    least = max(tools) if len(conversations) <= settings.concurrency else sum(tools) / settings.concurrency
    new, tokens = sum(turn.input_len for turn in prompts), sum(turn.prompt_len for turn in prompts)
    return (
        f"{settings.describe()}: {len(prompts):,} turns with {new:,} new tokens of {tokens:,} "
        f"({new / tokens:.1%}, which no cache can have); tools alone take {least:.0f} s"
        + ("" if settings.seconds is None else f", and no turn is sent after {settings.seconds:g} s")
    )


@contextmanager
def _started(own: OwnServer, console: Console) -> Iterator[str]:
    """The address of a server that runs meanwhile."""
    from penstock.bench.served import random_model, server

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = own.model if own.shape is None else random_model(own.shape, folder, console)
        with console.status("starting the server"):
            running = stack.enter_context(server(model, folder, device=own.device, settings=own.settings))
        yield running.url


def warnings(settings: AgentsBenchSettings, results: dict[str, Any]) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    if results["succeeded"] and results["cached_tokens"] is None:
        found.append(
            "The server does not say how many prompt tokens came from its cache "
            "(usage.prompt_tokens_details.cached_tokens; vLLM does with --enable-prompt-tokens-details)."
        )
    # Messages share what the chat template puts before them; a repeated run has nearly all of its prompts cached.
    unremarkable = 0.5 if settings.api == "chat" else 0.0
    if (results["first_turns_cached_share"] or 0.0) > unremarkable and not settings.shared_len:
        found.append(
            f"{report.share(results['first_turns_cached_share'])} of the tokens of first prompts came from the cache "
            "(an earlier run with the same seed?): TTFT is flattered. Pass another --seed."
        )
    if results["unsent"]:
        found.append(f"{results['unsent']:,} turns were not sent, because the run was ended before their time.")
    if results["lost"]:
        found.append(f"{results['lost']} turns were not sent, because a turn before them had failed.")
    return found
