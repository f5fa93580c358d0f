"""The process in which untrusted grammars are compiled first: it holds the vocabulary and forks a child per grammar.

A child has limits on processor time and memory and dies with its grammar, whatever that does to it: an endless loop,
gigabytes, a stack overflow. The process itself never looks at a grammar, so it need not be restarted after a bad one.
It has one thread, so that forking is safe, and ends when its parent's end of the socket closes.

On the control socket every message has 8 bytes. A message with a file descriptor starts a child that talks through it,
and is answered with the child's id; a message without one names a child to reap, and is answered with how it ended.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from penstock.engine.grammar.guidance import GuidanceCompiler, validate
from penstock.engine.grammar.interface import GrammarError, GrammarTooComplex, GreedyEncoder, Vocabulary, words_for
from penstock.engine.grammar.sandbox import WORD, Limits, receive_frame, send_frame

_WALKS = 2
_WALK_STEPS = 16
"""How far a grammar is followed: random texts, and tokens in each."""
_STACK = 1 << 20
_NICE = 5
"""The engine's steps go first."""


def serve(control: socket.socket, compiler: GuidanceCompiler | None, limits: Limits) -> None:
    children: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, WORD, 1)
        if not data:
            break
        if descriptors:
            child = os.fork()
            if child == 0:
                control.close()
                _run_child(socket.socket(fileno=descriptors[0]), compiler, limits)
            os.close(descriptors[0])
            children.add(child)
            control.sendall(child.to_bytes(WORD, "big"))
        else:
            child = int.from_bytes(data, "big")
            status = os.waitpid(child, 0)[1] if child in children else 0
            children.discard(child)
            control.sendall(status.to_bytes(WORD, "big"))
    for child in children:
        os.kill(child, signal.SIGKILL)


def _run_child(connection: socket.socket, compiler: GuidanceCompiler | None, limits: Limits) -> None:
    """One grammar; never returns."""
    try:
        _restrict(limits)
        # The threads that compute masks have small stacks; a grammar that overflows one must do so here.
        threading.stack_size(_STACK)
        thread = threading.Thread(target=_answer, args=(connection, compiler, limits))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _restrict(limits: Limits) -> None:
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limits.compile_s)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    most = size + limits.memory + _STACK
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(connection: socket.socket, compiler: GuidanceCompiler | None, limits: Limits) -> None:
    grammar = receive_frame(connection).decode()
    before = _resident()
    try:
        if compiler is None:
            validate(grammar)
        else:
            _try_out(compiler, grammar, limits)
        answer: dict[str, Any] = {"memory": max(_resident() - before, 0)}
    except GrammarError as error:
        answer = {"problem": str(error)[:2000], "costly": isinstance(error, GrammarTooComplex)}
    except MemoryError:
        os.abort()
    send_frame(connection, json.dumps(answer).encode())


def _try_out(compiler: GuidanceCompiler, grammar: str, limits: Limits) -> None:
    """Compile, and follow the grammar for some random tokens; raises what is wrong with it."""
    fresh = compiler.compile(grammar)
    mask = np.zeros((1, words_for(compiler.size)), np.int32)
    times: list[float] = []
    for walk in range(_WALKS):
        rng = random.Random(walk)
        matcher = compiler.copy(fresh)
        for step in range(_WALK_STEPS):
            begun = time.thread_time()
            compiler.fill([matcher], mask)
            took = time.thread_time() - begun
            if took > limits.mask_s:
                raise GrammarTooComplex(
                    f"it is too complex: finding the tokens that may come next took {took * 1e3:.0f} ms; "
                    f"at most {limits.mask_s * 1e3:.0f} ms are allowed"
                )
            times.append(took)
            if matcher.error is None:
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                matcher.accept(int(rng.choice(allowed)))
            if matcher.error is not None and (step == 0 or matcher.too_complex):
                raise (
                    GrammarTooComplex(f"it is too complex ({matcher.error})")
                    if matcher.too_complex
                    else GrammarError(matcher.error)
                )
            # Later than at the beginning, a random text may run into a corner that a model would not.
            if matcher.complete or matcher.error is not None:
                break
    mean = sum(times) / len(times)
    if mean > limits.masks_s:
        raise GrammarTooComplex(
            f"it is too complex: finding the tokens that may come next takes {mean * 1e3:.0f} ms on average; "
            f"at most {limits.masks_s * 1e3:.0f} ms are allowed"
        )


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the parent decides when it ends
    control = socket.socket(fileno=int(sys.argv[1]))
    setup = pickle.loads(receive_frame(control))
    limits = Limits(**setup["limits"])
    compiler = None
    if setup["tokens"] is not None:
        tokens, special, ends = setup["tokens"], setup["special"], setup["ends"]
        vocabulary = Vocabulary(tokens, special, ends, GreedyEncoder(tokens, special))
        compiler = GuidanceCompiler(vocabulary, setup["size"])
    control.sendall(os.getpid().to_bytes(WORD, "big"))
    serve(control, compiler, limits)


if __name__ == "__main__":
    main()
