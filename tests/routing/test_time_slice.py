"""Time slicing: one model awake at a time, none put to sleep during a request, no request starves (R-ENG-14)."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.routing.time_slice import TimeSlicePolicy, Transition

MODELS = ("a", "b", "c")
SLICE_S = 10.0


class Turns(RuleBasedStateMachine):
    """Requests come, wait, run, end and give up in any order; engines wake, sleep, and are lost."""

    @initialize()
    def start(self) -> None:
        self.now = 0.0
        self.policy = TimeSlicePolicy(SLICE_S, lambda: self.now)
        self.tickets: dict[int, str] = {}
        self.running: list[str] = []
        self.awake: str | None = None
        self.move: Transition | None = None
        self.woke_at = 0.0

    @rule(model=st.sampled_from(MODELS))
    def a_request_comes(self, model: str) -> None:
        self.tickets[self.policy.wait(model)] = model

    @rule(data=st.data())
    @precondition(lambda self: self.tickets)
    def a_request_tries_to_run(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        if self.policy.admit(ticket):
            model = self.tickets.pop(ticket)
            assert model == self.awake, "admitted to a model that does not answer"
            self.running.append(model)

    @rule(data=st.data())
    @precondition(lambda self: self.tickets)
    def a_request_gives_up(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.tickets)))
        del self.tickets[ticket]
        self.policy.leave(ticket)

    @rule(data=st.data())
    @precondition(lambda self: self.running)
    def a_request_ends(self, data: st.DataObject) -> None:
        model = data.draw(st.sampled_from(self.running))
        self.running.remove(model)
        self.policy.release(model)

    @rule(seconds=st.floats(0.1, 2 * SLICE_S))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    @precondition(lambda self: self.move is None)
    def the_next_move_begins(self) -> None:
        move = self.policy.next_move()
        if move is None:
            return
        if move.kind == "sleep":
            assert self.awake == move.model and not self.running, "put to sleep under a request"
            assert self.now - self.woke_at >= SLICE_S, "woken only to be put to sleep again"
            assert any(model != move.model for model in self.tickets.values()), "put to sleep for nobody"
            self.awake = None
        else:
            assert self.awake is None and move.model in self.tickets.values()
        self.policy.began(move)
        self.move = move

    @rule(succeeds=st.booleans())
    @precondition(lambda self: self.move is not None)
    def the_move_ends(self, succeeds: bool) -> None:
        assert self.move is not None
        if self.move.kind == "wake" and succeeds:
            self.policy.woke()
            self.awake, self.woke_at = self.move.model, self.now
        else:
            self.policy.slept()
        self.move = None

    @rule()
    @precondition(lambda self: self.awake is not None)
    def the_engine_is_lost_and_comes_back_asleep(self) -> None:
        self.policy.slept()
        self.awake = None

    @invariant()
    def whoever_waits_will_be_served(self) -> None:
        """With moves and time, and requests that end, the oldest request runs: nothing is ever stuck."""
        if not hasattr(self, "policy") or not self.tickets or self.running or self.move is not None:
            return
        mover = self.policy.next_move()
        blocked = mover is None and self.policy.due_in() is None
        admissible = self.policy.phase == "awake" and self.policy.model in self.tickets.values()
        assert not blocked or admissible


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def serve_all(
    policy: TimeSlicePolicy, clock: list[float], wanted: list[tuple[float, str]], run_s: float
) -> dict[int, float]:
    """Play `wanted` (arrival, model) against the policy with instant switches; when each request was admitted."""
    arrivals = sorted(wanted)
    waiting: dict[int, int] = {}
    ends: list[tuple[float, str]] = []
    admitted: dict[int, float] = {}
    while len(admitted) < len(wanted):
        while arrivals and arrivals[0][0] <= clock[0]:
            waiting[policy.wait(arrivals.pop(0)[1])] = len(waiting) + len(admitted)
        for end in [end for end in ends if end[0] <= clock[0]]:
            ends.remove(end)
            policy.release(end[1])
        while (move := policy.next_move()) is not None:
            policy.began(move)
            policy.woke() if move.kind == "wake" else policy.slept()
        for ticket in list(waiting):
            if policy.admit(ticket):
                admitted[waiting.pop(ticket)] = clock[0]
                ends.append((clock[0] + run_s, str(policy.model)))
        clock[0] += 0.25
    return admitted


def test_a_busy_model_gives_way_after_its_slice() -> None:
    """Requests for `a` never stop coming, and overlap; the one for `b` still gets its turn."""
    clock = [0.0]
    policy = TimeSlicePolicy(SLICE_S, lambda: clock[0])
    wanted = [(second, "a") for second in range(60)] + [(3.0, "b")]
    admitted = serve_all(policy, clock, wanted, run_s=2.0)
    waited_for_b = admitted[sorted(wanted).index((3.0, "b"))] - 3.0
    assert waited_for_b <= SLICE_S + 2.0 + 1.0
    assert len(admitted) == len(wanted)


def test_an_idle_model_is_replaced_after_its_slice_and_not_before() -> None:
    clock = [0.0]
    policy = TimeSlicePolicy(SLICE_S, lambda: clock[0])
    admitted = serve_all(policy, clock, [(0.0, "a"), (1.0, "b")], run_s=0.5)
    assert admitted == {0: 0.0, 1: SLICE_S}


def test_without_rivals_a_model_stays_awake() -> None:
    clock = [0.0]
    policy = TimeSlicePolicy(SLICE_S, lambda: clock[0])
    serve_all(policy, clock, [(0.0, "a"), (50.0, "a")], run_s=1.0)
    assert policy.next_move() is None and policy.phase == "awake"


def test_a_turn_step_by_step() -> None:
    clock = [0.0]
    policy = TimeSlicePolicy(SLICE_S, lambda: clock[0])
    assert policy.next_move() is None and policy.due_in() is None
    first = policy.wait("a")
    clock[0] = 1.0
    second = policy.wait("b")
    wake = policy.next_move()
    assert wake == Transition("wake", "a"), "the longest waiting"
    assert wake is not None
    policy.began(wake)
    assert (policy.phase, policy.model) == ("waking", "a") and policy.next_move() is None
    assert not policy.admit(first) and policy.due_in() is None
    policy.woke()
    assert policy.phase == "awake" and policy.admit(first) and policy.holders == 1
    assert not policy.admit(second) and policy.due_in() == SLICE_S
    clock[0] = 1.0 + SLICE_S
    assert policy.due_in() is None and policy.next_move() is None, "it still runs"
    late = policy.wait("a")
    assert not policy.admit(late), "its slice is over, and another waits"
    policy.release("a")
    sleep = policy.next_move()
    assert sleep == Transition("sleep", "a") and sleep is not None and policy.holders == 0
    policy.began(sleep)
    assert (policy.phase, policy.model) == ("falling", "a")
    policy.slept()
    assert (policy.phase, policy.model) == ("idle", None)
    assert policy.next_move() == Transition("wake", "b")
    policy.leave(second)
    assert policy.next_move() == Transition("wake", "a")
