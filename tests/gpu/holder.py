"""Another process's memory on a card: `python -m tests.gpu.holder INDEX`.

It takes as many bytes as each line of its input says, and gives all back where the input ends, so
that it doesn't outlive who started it.
"""

from __future__ import annotations

import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .namespace import ROOT

MIB = 1 << 20
_EXIT_S = 30.0


class Holder(ABC):
    granularity_bytes = 1

    @abstractmethod
    def take(self, nbytes: int) -> None:
        """So many bytes more. Raises RuntimeError where they can't be had."""


class ProcessHolder(Holder):
    granularity_bytes = 2 * MIB
    """Of cudaMalloc, and of PyTorch's allocator for large blocks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._expect("ready")

    def take(self, nbytes: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # what it answers tells more
            self._process.stdin.write(f"{nbytes}\n")
            self._process.stdin.flush()
        self._expect("held")

    def _expect(self, word: str) -> None:
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if said != word:
            raise RuntimeError(f"the process that holds memory said {said!r}, not {word}")


@contextmanager
def holding(index: int) -> Iterator[ProcessHolder]:
    """A process with a context on `cuda:index`, and after the block without."""
    command = [sys.executable, "-m", "tests.gpu.holder", str(index)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    try:
        yield ProcessHolder(process)
    finally:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main(index: int) -> None:
    import torch

    device = torch.device("cuda", index)
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    print("ready", flush=True)
    held = []
    for line in sys.stdin:
        held.append(torch.empty(int(line), dtype=torch.uint8, device=device))
        torch.cuda.synchronize(device)
        print("held", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
