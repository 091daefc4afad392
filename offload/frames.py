"""What an exception keeps alive."""

from __future__ import annotations

import traceback
from types import FrameType


def cut_off(error: BaseException) -> None:
    """Cut off the frames that `error`, and what led to it, came through and that have ended: what
    their variables hold is free while the error is still held. A note of the error tells them.
    Frames that still run stay in its traceback.

    To clear the frames' variables isn't enough: a frame keeps its function, and with it what that
    closes over, such as the arguments of a module that has hooks.
    """
    told = "".join(traceback.format_exception(error)).rstrip()
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        each = errors.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            _cut(each)
            errors += [each.__context__, each.__cause__]
    error.add_note(f"The frames of the run that failed are gone. They were:\n{told}")


def _cut(error: BaseException) -> None:
    running, at = None, error.__traceback__
    while at is not None and _runs(at.tb_frame):
        running, at = at, at.tb_next
    traceback.clear_frames(at)
    if running is None:
        error.__traceback__ = None
    else:
        running.tb_next = None


def _runs(frame: FrameType) -> bool:
    try:
        frame.clear()
    except RuntimeError:
        return True
    return False
