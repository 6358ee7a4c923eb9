"""Threads of which one runs at a time (support/turns.py)."""

from __future__ import annotations

import pytest

from support.turns import Turns


@pytest.mark.parametrize("seed", range(5))
def test_threads_wait_for_each_other(seed):
    turns, said = Turns(seed), []

    def say(me: int) -> None:
        for i in range(me, 9, 3):
            turns.wait(lambda i=i: len(said) == i)
            said.append(i)

    def three() -> None:
        turns.together([lambda me=me: say(me) for me in range(3)])
        said.append("all")

    turns.together([three])
    assert said == [*range(9), "all"]


def test_what_was_asked_for_happens_early_and_late():
    """Before a thread that need not wait for it, or after it. Who waits for it finds it."""
    found = set()
    for seed in range(20):
        turns, done = Turns(seed), []

        def work(turns=turns, done=done) -> None:
            turns.at_some_time(lambda: done.append(1))
            turns.let_one()
            found.add(len(done))
            turns.wait(lambda: bool(done))

        turns.together([work])
    assert found == {0, 1}


def test_who_lets_all_others_goes_on_last():
    for seed in range(5):
        turns, said = Turns(seed), []

        def late(turns=turns, said=said) -> None:
            turns.let_all()
            said.append("late")

        def other(turns=turns, said=said) -> None:
            for _ in range(9):
                turns.let_one()
                said.append("other")

        turns.together([late, other])
        assert said == ["other"] * 9 + ["late"]


def test_errors():
    """The first of any thread, also of those that a thread started; of what a thread asked for; and where nobody can go on."""
    turns = Turns(0)

    def wrong() -> None:
        turns.let_one()
        raise ValueError("wrong")

    def waits() -> None:
        turns.wait(lambda: False)
        raise AssertionError("it went on")

    with pytest.raises(ValueError, match="wrong"):
        turns.together([lambda: turns.together([wrong, waits]), waits])
    turns = Turns(0)
    with pytest.raises(ValueError, match="wrong"):
        turns.together([lambda: turns.at_some_time(wrong), waits])
    turns = Turns(0)
    with pytest.raises(AssertionError, match="every thread waits"):
        turns.together([waits, waits])
    turns, looked = Turns(0), []

    def looks() -> None:
        while True:
            turns.let_all()
            looked.append(1)

    with pytest.raises(AssertionError, match="every thread waits"):
        turns.together([looks])
    assert len(looked) >= Turns.SPINS - 1
