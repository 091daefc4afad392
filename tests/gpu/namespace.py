"""`residency` out of this checkout, installed or not, here and in child processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def importable(root: Path = ROOT) -> Iterator[None]:
    """Inside, `import residency` and `import tests.gpu` find `root`, before what is installed."""
    before = os.environ.get("PYTHONPATH")
    with TemporaryDirectory(prefix="residency-") as folder:
        (Path(folder) / "residency").symlink_to(root, target_is_directory=True)
        places = [folder, str(root)]
        sys.path[:0] = places
        os.environ["PYTHONPATH"] = os.pathsep.join([*places, *([before] if before else [])])
        try:
            yield
        finally:
            for place in places:
                sys.path.remove(place)
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before
