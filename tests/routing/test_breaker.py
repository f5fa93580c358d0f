"""The breaker and the retry budget, whatever happens in whatever order (R-RT-7)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.routing.breaker import Breaker, BreakerPolicy
from penstock.routing.retry_budget import RetryBudget


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


POLICY = BreakerPolicy(failures=3, share=0.5, window_s=30.0, open_s=2.0, most_open_s=10.0)


def broken() -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker(POLICY, clock)
    for _ in range(3):
        breaker.failed()
    return breaker, clock


def test_a_few_failures_among_many_successes_do_not_open_it() -> None:
    breaker = Breaker(POLICY, Clock())
    for _ in range(20):
        breaker.succeeded()
        breaker.succeeded()
        breaker.failed()
    assert breaker.allows and breaker.state == "closed"


def test_it_says_when_it_will_be_tried_again() -> None:
    assert Breaker(POLICY, Clock()).opens_in_s == 0.0
    breaker, clock = broken()
    assert breaker.opens_in_s == 2.0
    clock.now += 0.5
    assert breaker.opens_in_s == 1.5
    clock.now += 5.0
    assert breaker.opens_in_s == 0.0


def test_old_failures_are_forgotten() -> None:
    clock = Clock()
    breaker = Breaker(POLICY, clock)
    for _ in range(10):
        breaker.failed()
        clock.now += 16.0
    assert breaker.state == "closed", "never three within the window"


def test_it_opens_then_lets_one_probe_through_whose_token_closes_it() -> None:
    breaker, clock = broken()
    assert not breaker.allows and breaker.opens_in_s == 2.0
    clock.now += 2.0
    assert breaker.allows
    breaker.began()
    assert not breaker.allows, "one probe at a time"
    breaker.succeeded()
    assert breaker.allows and breaker.state == "closed"


def test_each_failed_probe_doubles_the_wait_up_to_a_limit_and_a_token_resets_it() -> None:
    breaker, clock = broken()
    for wait in (2.0, 4.0, 8.0, 10.0, 10.0):
        assert breaker.opens_in_s == wait
        clock.now += wait
        breaker.began()
        breaker.failed()
    clock.now += 10.0
    breaker.began()
    breaker.succeeded()
    breaker.trip()
    assert breaker.opens_in_s == 2.0


def test_a_probe_whose_client_leaves_does_not_keep_it_out() -> None:
    breaker, clock = broken()
    clock.now += 2.0
    breaker.began()
    clock.now += 2.0
    assert breaker.allows


Event = st.one_of(st.sampled_from(["send", "succeed", "fail", "trip"]), st.floats(0.01, 20.0))


@settings(max_examples=200, deadline=None)
@given(st.lists(Event, max_size=60))
def test_whatever_happens_an_open_breaker_stays_shut_for_its_time_and_never_for_ever(events: list[str | float]) -> None:
    clock = Clock()
    breaker = Breaker(POLICY, clock)
    opened_at: float | None = None
    for event in events:
        before = breaker.state
        if isinstance(event, float):
            clock.now += event
        elif event == "send":
            if breaker.allows:
                breaker.began()
                assert before != "half_open" or not breaker.allows, "one probe at a time"
        elif event == "succeed":
            breaker.succeeded()
            assert before == "open" or breaker.state == "closed"
        elif event == "fail":
            breaker.failed()
            assert before != "half_open" or breaker.state == "open"
        else:
            breaker.trip()
            assert breaker.state == "open"
        if breaker.state == "open" and (before != "open" or opened_at is None):
            opened_at = clock.now
        if breaker.state == "open":
            assert opened_at is not None and clock.now - opened_at < POLICY.most_open_s
            assert not breaker.allows
    clock.now += POLICY.most_open_s + POLICY.open_s
    assert breaker.allows


@settings(max_examples=200, deadline=None)
@given(st.lists(st.booleans(), max_size=300), st.sampled_from([0.0, 0.05, 0.1, 0.3]))
def test_retries_are_never_more_than_their_share_of_the_requests(retries: list[bool], share: float) -> None:
    budget = RetryBudget(share)
    requests = 0
    for retry in retries:
        if retry:
            budget.take()
        else:
            requests += 1
            budget.began()
        assert budget.taken <= share * requests + 1e-9


def test_the_whole_share_can_be_used_and_a_quiet_day_saves_up_only_so_much() -> None:
    budget = RetryBudget(0.1, most=5)
    for _ in range(1000):
        budget.began()
    assert sum(budget.take() for _ in range(1000)) == 5
    assert sum((budget.began(), budget.take())[1] for _ in range(100)) == 10


def test_a_failure_counts_to_the_very_end_of_the_window() -> None:
    for age, state in ((30.0, "open"), (30.01, "closed")):
        clock = Clock()
        breaker = Breaker(POLICY, clock)
        breaker.failed()
        clock.now += age
        breaker.failed()
        breaker.failed()
        assert breaker.state == state


def test_it_opens_at_exactly_its_share_and_successes_leave_the_window_too() -> None:
    clock = Clock()
    breaker = Breaker(POLICY, clock)
    for _ in range(4):
        breaker.succeeded()
    for _ in range(3):
        breaker.failed()
        assert breaker.state == "closed", "three of seven are less than half"
    breaker.failed()
    assert breaker.state == "open" and breaker.trips == 1
    clock = Clock()
    breaker = Breaker(POLICY, clock)
    for _ in range(200):
        breaker.succeeded()
    clock.now += 30.5
    for _ in range(3):
        breaker.failed()
    assert breaker.state == "open", "what was good half a minute ago does not outweigh it"


def test_only_so_many_results_are_remembered() -> None:
    breaker = Breaker(POLICY, Clock())
    for _ in range(1000):
        breaker.succeeded()
    for _ in range(127):
        breaker.failed()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "open", "half of the last 256"


def test_results_from_before_it_opened_do_not_count_after_it_closed() -> None:
    breaker, clock = broken()
    assert (breaker.trips, breaker.state) == (1, "open")
    breaker.failed()
    breaker.succeeded()
    breaker.trip()
    assert breaker.trips == 1 and breaker.opens_in_s == 2.0, "an open breaker hears nothing"
    clock.now += 2.0
    assert breaker.state == "half_open" and breaker.opens_in_s == 0.0
    breaker.began()
    breaker.succeeded()
    breaker.failed()
    breaker.failed()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "open" and breaker.trips == 2


def test_a_new_probe_may_start_only_once_the_last_is_given_up() -> None:
    breaker, clock = broken()
    clock.now += 5.0
    assert breaker.opens_in_s == 0.0
    breaker.began()
    clock.now += 1.99
    assert not breaker.allows
    clock.now += 0.01
    assert breaker.allows
    breaker.failed()
    clock.now += 4.0
    assert breaker.allows, "the probe of the last time is forgotten"
    breaker.trip()
    assert breaker.state == "open" and breaker.trips == 3 and breaker.opens_in_s == 4.0


def test_the_defaults() -> None:
    assert BreakerPolicy() == BreakerPolicy(3, 0.5, 30.0, 2.0, 60.0)


def test_a_spent_budget_counts_what_it_refuses() -> None:
    budget = RetryBudget()
    assert not budget.take() and (budget.taken, budget.refused) == (0, 1)
    for _ in range(10):
        budget.began()
    assert budget.take() and not budget.take() and (budget.taken, budget.refused) == (1, 2)
    for _ in range(2000):
        budget.began()
    assert sum(budget.take() for _ in range(150)) == 100
