"""An interrupt may strike at any bytecode of an interpreted call; the library is as before, and no lock stays locked."""

from __future__ import annotations

import sys
import threading
import time

import interrupts
import numpy as np
import pytest
import torch
import triton.language as tl

from flexpress import evaluate_mod
from flexpress.codegen import turn
from flexpress.codegen.device import compiler, interpret, interpreter_numbers, interpreter_patches, kernel, switching
from flexpress.codegen.turn import Turn
from support.fresh_mods import language, same_language, score_mod

_INTERPRETER = (interpret.__file__, switching.__file__, interpreter_numbers.__file__, interpreter_patches.__file__)
_FILES = (*_INTERPRETER, turn.__file__, kernel.__file__)
_CAREFULLY = {"run", "_run", "_switched", "_taken", "restore", "switches", "_interpret", "launch"}  # every bytecode; of the others some
_LONG = {"<listcomp>", "<genexpr>"}  # tens of thousands


def strike_at(moment: int, call, files=_FILES) -> bool:
    """Raise KeyboardInterrupt before the `moment`-th bytecode of functions in `files` while `call` runs; was there one?"""
    passed = 0

    def each(frame, event, _):
        nonlocal passed
        if event == "opcode":
            name = frame.f_code.co_name
            passed += 1 if name in _CAREFULLY else 0.001 if name in _LONG else 0.05
            if passed >= moment:
                sys.settrace(None)
                passed = float("-inf")
                raise KeyboardInterrupt
        return each

    def enter(frame, *_):
        if frame.f_code.co_filename not in files:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return each

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_no_bytecode_leaves_anything_behind():
    """Once by once: triton.language, gradients and NumPy's errors are what they were at once; and no other thread is kept out."""
    scores, mod = torch.randn(1, 1, 1, 1), score_mod(1)
    expected = evaluate_mod(mod, scores)
    pristine, errors, moments = language(), np.geterr(), 0
    while strike_at(moments + 1, lambda: evaluate_mod(mod, scores)):
        moments += 1
        assert same_language(pristine) and torch.is_grad_enabled() and np.geterr() == errors, f"bytecode {moments}"
        if moments % 10 == 0:
            assert torch.equal(evaluate_mod(mod, scores), expected)
    assert moments > 200
    assert torch.equal(evaluate_mod(mod, scores), expected)


def test_an_interrupted_first_switch_is_undone_at_the_next_one(monkeypatch):
    """Triton's own patches are made one by one, once in a process."""
    scores, mod = torch.randn(1, 1, 1, 1), score_mod(1)
    expected = evaluate_mod(mod, scores)
    monkeypatch.setattr(tl, "of_others", object(), raising=False)  # since this process switched first
    pristine = language()
    for moment in (1, 5, 50, 300, 700):
        switching.restore()
        for known in ("_unchanged", "_changes", "_setters"):
            monkeypatch.setattr(switching, known, [])
        assert strike_at(moment, lambda: evaluate_mod(mod, scores), (*_INTERPRETER, interpret.interpreter.__file__))
        switching.restore()
        assert same_language(pristine) and torch.equal(evaluate_mod(mod, scores), expected)


def test_what_is_left_switched_is_switched_back_by_whoever_comes_next():
    """As a fork in the middle of another thread's kernel leaves it."""
    evaluate_mod(score_mod(1), torch.ones(1, 1, 1, 1))
    pristine = language()
    for next_one in (lambda: evaluate_mod(score_mod(1), torch.ones(1, 1, 1, 1)), interrupts.compiles):
        there, _ = switching.switches()
        switching.at_once(there)
        assert not same_language(pristine)
        next_one()
        assert same_language(pristine)


def test_every_change_of_the_interpreter_is_known(monkeypatch):
    """Triton's own record of what it patches has nothing that would not be switched back."""
    evaluate_mod(score_mod(1), torch.ones(1, 1, 1, 1))
    pristine, scopes, patch = language(), [], switching.patch
    monkeypatch.setattr(switching, "_changes", [])
    monkeypatch.setattr(switching, "patch", lambda: scopes.append(patch()))
    known = {(id(owner), name) for owner, name, *_ in switching._found_by_switching()}
    assert {(id(owner), name) for owner, name, _ in scopes[0]._changes} == known and len(known) > 200
    assert same_language(pristine)


def test_patches_of_others_survive(monkeypatch):
    evaluate_mod(score_mod(1), torch.ones(1, 1, 1, 1))
    mine = object()
    monkeypatch.setattr(tl, "cdiv", mine)
    evaluate_mod(score_mod(1), torch.ones(1, 1, 1, 1))
    assert tl.cdiv is mine


def test_interrupts_at_random_moments():
    """A few of `python tests/interrupts.py --n 500`."""
    assert interrupts.campaign(12, seed=1, offline=False) > 0


def test_a_lock_whose_holder_was_interrupted_opens_again(monkeypatch):
    monkeypatch.setattr(turn, "_LOOK_AGAIN", 0.02)
    mine, found, done, gone = Turn(), [], threading.Event(), threading.Event()
    keeper = threading.Thread(target=lambda: (mine._taken(), gone.set(), done.wait()))
    for holder in ("this thread", "another thread"):
        if holder == "this thread":
            mine._taken()  # and an interrupt strikes
        else:
            keeper.start()
            gone.wait()
        assert mine.run(lambda: 7) == 7
        other = threading.Thread(target=lambda: found.append(mine.run(lambda: 8)))
        other.start()
        other.join(10)
        assert found.pop() == 8
    done.set()
    keeper.join()


def test_a_lock_that_is_held_keeps_others_out(monkeypatch):
    monkeypatch.setattr(turn, "_LOOK_AGAIN", 0.001)
    mine, inside, most, total = Turn(), 0, 0, []

    def work():
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.002)
        total.append(mine.run(lambda: 1))  # inside twice
        inside -= 1

    threads = [threading.Thread(target=lambda: [mine.run(work) for _ in range(5)]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1 and len(total) == 30


def test_a_kernel_inside_a_kernel_is_refused():
    """A signal handler or a finalizer that calls the library while a kernel runs in its thread."""
    with pytest.raises(RuntimeError, match="signal handler or finalizer"):
        switching.LANGUAGE.run(lambda: evaluate_mod(score_mod(1), torch.ones(1, 1, 1, 1)))


def test_at_the_end_of_the_process_a_thread_that_comes_to_compile_ends(monkeypatch):
    monkeypatch.setattr(turn, "_LOOK_AGAIN", 0.02)
    mine, ended = Turn(), []
    mine.close()

    def late():
        try:
            mine.run(print)
        except SystemExit:
            ended.append(True)

    thread = threading.Thread(target=late)
    thread.start()
    thread.join(10)
    assert ended == [True] and compiler._compiler._closed is False


def seen_by_another(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def test_a_lock_that_an_interrupt_left_with_its_thread_is_given_back():
    """By that thread's next turn, so that others need not wait until they find out."""
    turn = Turn()
    for _ in range(2):
        assert turn._lock.acquire()  # and thrown out before `try`
    assert not seen_by_another(turn.is_free)
    assert turn.run(lambda: 3) == 3
    assert seen_by_another(turn.is_free)


def test_a_turn_inside_a_turn_leaves_the_lock():
    turn = Turn()

    def outer():
        turn.run(lambda: None)
        return seen_by_another(turn.is_free)

    assert turn.run(outer) is False
    assert seen_by_another(turn.is_free)
