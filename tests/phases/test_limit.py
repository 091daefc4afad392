import threading
import time

import pytest

from residency.offload.errors import CancelledError, OvertimeError
from residency.phases import limit as module
from residency.phases.limit import Limit


def test_without_a_deadline_there_is_always_time():
    limit = Limit()
    limit.check()
    assert limit.left_s is None
    assert not limit.is_over


def test_past_its_deadline_a_check_says_how_long_it_was_given():
    limit = Limit(0.0)
    assert limit.is_over
    with pytest.raises(OvertimeError, match=r"longer than the 0.0 s"):
        limit.check()


def test_a_cancelled_limit_stops_whoever_checks_from_any_thread():
    limit = Limit(1000)
    thread = threading.Thread(target=limit.cancel)
    thread.start()
    thread.join()
    with pytest.raises(CancelledError):
        limit.check()


def test_of_nested_deadlines_the_earliest_holds_and_is_gone_afterwards():
    limit = Limit(1000)
    with limit.within(0.0):
        assert limit.is_over
        with limit.within(500):
            assert limit.is_over
    assert limit.left_s > 500
    limit.check()


def test_no_seconds_add_no_deadline():
    limit = Limit()
    with limit.within(None, interrupt=True):
        assert limit.left_s is None


def hang():
    """For a minute, if nobody interrupts."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)


def test_code_that_never_checks_is_interrupted(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.05)
    with pytest.raises(OvertimeError, match="hung"), Limit().within(0.05, interrupt=True):
        hang()


def test_an_outer_deadline_interrupts_too(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    with pytest.raises(OvertimeError), Limit(0.05).within(None, interrupt=True):
        hang()


def test_what_ends_in_time_is_not_interrupted_afterwards(monkeypatch):
    monkeypatch.setattr(module, "GRACE_S", 0.0)
    with Limit().within(0.02, interrupt=True):
        pass
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        time.sleep(0.01)
