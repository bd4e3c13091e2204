"""Signals as wishes, within one process; real runs that are asked to stop are in tests/integration."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trainers.interrupts import Interrupts
from trainers.ranks import start_ranks


@pytest.fixture
def interrupts():
    """Entered, and with pytest's own handlers afterwards whatever happened."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with Interrupts(start_ranks()) as entered:
        yield entered
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_update_at_hand_is_finished_and_no_other_begun(interrupts, number, capfd):
    done = []
    for update in interrupts.until_asked(range(5)):
        if update == 1:
            os.kill(os.getpid(), number)
        done.append(update)
    assert done == [0, 1]
    assert interrupts.is_asked
    assert f"{signal.Signals(number).name}: the run ends after the update at hand" in capfd.readouterr().err


def test_a_signal_before_the_first_update_lets_none_begin(interrupts):
    os.kill(os.getpid(), signal.SIGTERM)
    assert list(interrupts.until_asked(range(5))) == []
    assert interrupts.is_asked


def test_a_signal_in_the_last_update_changes_nothing(interrupts):
    for update in interrupts.until_asked(range(2)):
        if update == 1:
            os.kill(os.getpid(), signal.SIGTERM)
    assert not interrupts.is_asked


def test_a_second_ctrl_c_stops_at_once_and_a_second_sigterm_does_not(interrupts):
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_second_ctrl_c_stops_at_once_also_while_the_first_is_being_answered(interrupts, monkeypatch):
    said = []

    def write(file: int, line: bytes) -> None:
        said.append(line)
        os.kill(os.getpid(), signal.SIGINT)  # of somebody who has read the line

    monkeypatch.setattr("trainers.interrupts.os.write", write)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert len(said) == 1


def test_handlers_come_back_and_other_threads_have_none():
    before = signal.getsignal(signal.SIGTERM)
    with Interrupts(start_ranks()):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before

    found = []

    def elsewhere() -> None:
        with Interrupts(start_ranks()) as interrupts:
            found.append(list(interrupts.until_asked(range(2))))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [[0, 1]]


def test_a_wish_from_elsewhere_counts_from_the_next_update_on(interrupts):
    done = []
    interrupts.is_asked_elsewhere = lambda: len(done) == 2
    for update in interrupts.until_asked(range(5)):
        done.append(update)
    assert done == [0, 1]
    assert interrupts.is_asked
