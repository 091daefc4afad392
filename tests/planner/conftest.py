import gc

import pytest


@pytest.fixture(autouse=True, scope="session")
def _what_is_imported_is_no_garbage():
    """A rollback collects garbage; without this each collection walks all of diffusers."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    gc.collect()
    gc.freeze()
