"""Every error that `residency` raises on purpose.

    ResidencyError
    ├── InputError              what the user asked for can't be: exit code 2
    │   ├── UnknownNameError    a card, pipeline, component or setting that doesn't exist
    │   ├── ShapeError          a shape that can't be read, or that the pipeline can't run
    │   ├── PlanFileError       a plan file that can't be read, or from another version
    │   │   └── StalePlanError  a plan that was made under another fingerprint
    │   └── OutsideEnvelopeError  a request that is larger than what was validated
    ├── DeviceError
    │   ├── DeviceBusyError     another card's tensors are still on the device
    │   ├── DeviceIntegrityError  what is allocated isn't what is alive
    │   ├── LockedError         another process plans on the card
    │   ├── OrderError          work that has to come after other work isn't made to wait for it
    │   └── VirtualDataError    the value of a tensor that has only a shape was asked for
    ├── OffloadError            a module that can't be offloaded as asked
    ├── HostMemoryError         host masters that don't fit in host memory
    ├── JournalError            a journal that can't be read or written
    ├── PhaseError              a run whose phases can't be made into one graph
    ├── RankError               another rank failed, died, or said nothing in time
    ├── StoppedError            a run that was ended before it was done
    │   ├── CancelledError      because somebody said so
    │   └── OvertimeError       because it took longer than it was given
    ├── BusyError               another request runs, and this one isn't to wait for longer
    ├── ReentryError            a request that was begun inside another one
    ├── BaselineError           the baseline itself doesn't fit: exit code 1
    └── RollbackError           the state after a rollback isn't the state before

Running out of device memory is `torch.OutOfMemoryError`, from a simulated card as from a real one.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ResidencyError(Exception):
    """`message` says what happened, with the numbers; `hint` what to do about it."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(ResidencyError):
    pass


class UnknownNameError(InputError):
    """`kind` is the noun for `name`; `known` are the names that would have been accepted."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, hint: str = "") -> None:
        self.kind = kind
        self.name = name
        self.known = tuple(known)
        close = get_close_matches(name, self.known, n=3, cutoff=0.5)
        hints = [f"did you mean {' or '.join(map(repr, close))}?"] if close else []
        if hint:
            hints.append(hint)
        if not close:
            hints.append(f"known: {', '.join(self.known) or 'none'}")
        super().__init__(f"there is no {kind} {name!r}", hint="; ".join(hints))


class ShapeError(InputError):
    pass


class PlanFileError(InputError):
    pass


class StalePlanError(PlanFileError):
    pass


class OutsideEnvelopeError(InputError):
    """`shape` is outside each of the validated shapes in `envelope`."""

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        shape: str = "",
        envelope: Iterable[str] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.shape = shape
        self.envelope = tuple(envelope)


class DeviceError(ResidencyError):
    pass


class DeviceBusyError(DeviceError):
    pass


class DeviceIntegrityError(DeviceError):
    pass


class LockedError(DeviceError):
    pass


class OrderError(DeviceError):
    pass


class VirtualDataError(DeviceError):
    pass


class OffloadError(ResidencyError):
    pass


class HostMemoryError(ResidencyError):
    pass


class JournalError(ResidencyError):
    pass


class PhaseError(ResidencyError):
    pass


class RankError(ResidencyError):
    """`ranks` are those at fault; empty where none can be told."""

    def __init__(self, message: str, *, hint: str | None = None, ranks: Iterable[int] = ()) -> None:
        super().__init__(message, hint=hint)
        self.ranks = tuple(ranks)


class StoppedError(ResidencyError):
    pass


class CancelledError(StoppedError):
    pass


class OvertimeError(StoppedError):
    pass


class BusyError(ResidencyError):
    pass


class ReentryError(ResidencyError):
    pass


class BaselineError(ResidencyError):
    pass


class RollbackError(ResidencyError):
    pass
