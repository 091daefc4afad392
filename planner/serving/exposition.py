"""Families of samples, and their lines in Prometheus' text form 0.0.4."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from ...offload.errors import InputError

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_Labels = tuple[str, ...]


class Family:
    """Samples of one name, one for each combination of label values."""

    kind: str

    def __init__(self, lock: threading.RLock, name: str, text: str, labels: _Labels = ()) -> None:
        self.name = name
        self.text = text
        self.labels = labels
        self._lock = lock
        self._values: dict[_Labels, float] = {} if labels else {(): 0}

    def value(self, **labels: str) -> float:
        """0 for a combination that hasn't been seen."""
        with self._lock:
            return self._values.get(self._key(labels), 0)

    def _key(self, labels: Mapping[str, str]) -> _Labels:
        if labels.keys() != {*self.labels}:
            raise InputError(
                f"{self.name} was given the labels {sorted(labels)}",
                hint=f"it has {sorted(self.labels)}",
            )
        return tuple(str(labels[label]) for label in self.labels)

    def samples(self) -> Iterator[str]:
        for key, value in self._values.items():
            yield _sample(self.name, self.labels, key, value)

    def lines(self) -> Iterator[str]:
        yield f"# HELP {self.name} {_escaped(self.text)}"
        yield f"# TYPE {self.name} {self.kind}"
        yield from self.samples()


class Counter(Family):
    kind = "counter"

    def add(self, count: int = 1, **labels: str) -> None:
        """Raises InputError for a count below 0."""
        if count < 0:
            raise InputError(f"{self.name} can't go down by {-count}", hint="use a gauge")
        with self._lock:
            key = self._key(labels)
            self._values[key] = self._values.get(key, 0) + count


class Gauge(Family):
    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        with self._lock:
            self._values[self._key(labels)] = value

    def replace(self, values: Mapping[_Labels, float]) -> None:
        """All samples at once: those that aren't among `values` are gone."""
        with self._lock:
            self._values = dict(values)


class Summary(Family):
    """How many values there were, and their sum."""

    kind = "summary"

    def __init__(self, lock: threading.RLock, name: str, text: str, labels: _Labels = ()) -> None:
        super().__init__(lock, name, text, labels)
        self._counts: dict[_Labels, int] = dict.fromkeys(self._values, 0)

    def observe(self, value: float, **labels: str) -> None:
        with self._lock:
            key = self._key(labels)
            self._values[key] = self._values.get(key, 0) + value
            self._counts[key] = self._counts.get(key, 0) + 1

    def count(self, **labels: str) -> int:
        with self._lock:
            return self._counts.get(self._key(labels), 0)

    def samples(self) -> Iterator[str]:
        for key, value in self._values.items():
            yield _sample(f"{self.name}_sum", self.labels, key, value)
            yield _sample(f"{self.name}_count", self.labels, key, self._counts[key])


def _sample(name: str, labels: _Labels, key: _Labels, value: float) -> str:
    pairs = ",".join(
        f'{label}="{_escaped(each, quotes=True)}"' for label, each in zip(labels, key, strict=True)
    )
    return f"{name}{{{pairs}}} {_number(value)}" if pairs else f"{name} {_number(value)}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


def _number(value: float) -> str:
    """As Go reads it."""
    special = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
    return special.get(text := repr(value), text)
