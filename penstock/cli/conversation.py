"""The screen of `penstock chat`: one question, or a conversation with commands."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from penstock.cli.chat_client import Answer, ChatError, Client, Message, Options
from penstock.cli.terminal import show_error, stderr

COMMANDS = {
    "/help": "show this list",
    "/model NAME": "continue with another model; without a name, list them",
    "/system TEXT": "start over with this system prompt; without a text, with none",
    "/reset": "start over",
    "/retry": "ask the last question again",
    "/exit": "quit (as Ctrl-D does)",
}


def one_shot(
    client: Client, model: str, system: str | None, options: Options, message: str, *, quiet: bool, plain: bool
) -> None:
    answer = Answer()
    messages = _opening(system) + [{"role": "user", "content": message}]
    think = None if quiet else Thoughts()
    _show(client.stream(model, messages, options, answer, think), plain=plain, think=think)
    if not quiet:
        stderr().print(answer.summary(), style="dim", markup=False)


class Conversation:
    """An interactive conversation. A refused turn is taken back, so that it can go on."""

    def __init__(self, client: Client, model: str, system: str | None, options: Options, *, plain: bool) -> None:
        self._client = client
        self._model = model
        self._system = system
        self._options = options
        self._plain = plain
        self._messages = _opening(system)

    def run(self) -> None:
        """Until the user leaves."""
        import readline  # noqa: F401  (line editing and history for input())

        self._say(f"Chat with {self._model}. /help lists the commands, Ctrl-C stops an answer, Ctrl-D quits.")
        while True:
            try:
                text = input("\n› ").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return
            if text in ("/exit", "/quit"):
                return
            try:
                self._take(text)
            except ChatError as error:
                show_error(str(error))

    def _take(self, text: str) -> None:
        command, _, rest = text.partition(" ")
        rest = rest.strip()
        if not text.startswith("/"):
            if text:
                self._ask(text)
        elif command == "/help":
            for name, what in COMMANDS.items():
                self._say(f"  {name:14}{what}")
        elif command == "/model":
            self._choose(rest)
        elif command == "/system":
            self._system = rest or None
            self._start_over()
        elif command == "/reset":
            self._start_over()
        elif command == "/retry":
            self._retry()
        else:
            self._say(f"There is no command {command}; /help lists them.")

    def _ask(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})
        answer = Answer()
        try:
            think = Thoughts()
            pieces = self._client.stream(self._model, self._messages, self._options, answer, think)
            _show(pieces, plain=self._plain, think=think)
            self._say(answer.summary())
        except KeyboardInterrupt:
            self._say("stopped")
        finally:
            if answer.text:
                self._messages.append({"role": "assistant", "content": answer.text})
            else:
                self._messages.pop()

    def _choose(self, name: str) -> None:
        found = self._client.models()
        if name in found:
            self._model = name
            self._say(f"{name} answers from now on")
        else:
            known = ", ".join(f"{each} (now)" if each == self._model else each for each in found)
            self._say(f"There is no model {name}. Served: {known}" if name else f"Served: {known}")

    def _retry(self) -> None:
        while self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
        if self._messages and self._messages[-1]["role"] == "user":
            self._ask(self._messages.pop()["content"])
        else:
            self._say("There is no question to ask again.")

    def _start_over(self) -> None:
        self._messages = _opening(self._system)
        self._say("started over" + (f", with the system prompt: {self._system}" if self._system else ""))

    def _say(self, text: str) -> None:
        stderr().print(text, style="dim", markup=False)


class Thoughts:
    """Shows what a model thinks before it answers, dim and beside the answer: on standard error."""

    def __init__(self) -> None:
        self.open = False
        """Whether a thought stands on the last line."""

    def __call__(self, piece: str) -> None:
        self.open = True
        stderr().print(piece, style="dim", markup=False, highlight=False, end="", soft_wrap=True)

    def close(self) -> None:
        if self.open:
            stderr().print("\n")
            self.open = False


def _show(pieces: Iterator[str], *, plain: bool, think: Thoughts | None = None) -> None:
    """Markdown on a terminal; in a pipe, or if asked for, the text as it comes. `think`: shows thoughts meanwhile."""
    if think is not None:
        pieces = _after_thoughts(pieces, think)
    if plain or not sys.stdout.isatty():
        _write(pieces)
        return
    from rich.console import Console

    from penstock.cli.markdown_stream import MarkdownStream

    with MarkdownStream(Console(highlight=False)) as shown:
        for piece in pieces:
            shown.write(piece)


def _after_thoughts(pieces: Iterator[str], think: Thoughts) -> Iterator[str]:
    """The pieces, below the thought; the first is awaited here, while nothing else is drawn."""
    first = next(pieces, "")
    think.close()

    def all_pieces() -> Iterator[str]:
        if first:
            yield first
        for piece in pieces:
            think.close()
            yield piece

    return all_pieces()


def _write(pieces: Iterator[str]) -> None:
    from penstock.telemetry.printable import printable

    try:
        for piece in pieces:
            # On a terminal a model must not send control characters.
            sys.stdout.write(printable(piece, keep="\n\t") if sys.stdout.isatty() else piece)
            sys.stdout.flush()
    finally:
        sys.stdout.write("\n")
        sys.stdout.flush()


def _opening(system: str | None) -> list[Message]:
    return [{"role": "system", "content": system}] if system else []
