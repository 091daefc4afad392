"""Silence for libraries that log what is no news to us."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps diffusers and transformers from logging; what goes wrong, they raise as well."""
    from diffusers.utils import logging as diffusers_logs
    from transformers.utils import logging as transformers_logs

    libraries = (diffusers_logs, transformers_logs)
    before = [library.get_verbosity() for library in libraries]
    for library in libraries:
        library.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        for library, verbosity in zip(libraries, before, strict=True):
            library.set_verbosity(verbosity)
