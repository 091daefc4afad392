import gc

import pytest
from settling import Program, Settling


@pytest.fixture(autouse=True, scope="session")
def _what_is_imported_is_no_garbage():
    """A rollback collects garbage; without this each collection walks all of diffusers."""
    import diffusers  # noqa: F401
    import transformers  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def settling(tmp_path_factory):
    """Makes servers whose starts are processes of their own."""
    program = Program()
    try:
        yield Settling(program, tmp_path_factory.mktemp("settling"))
    finally:
        program.close()


@pytest.fixture(scope="session")
def committed(settling):
    """A server whose first start committed."""
    server = settling.server()
    assert server.boots().settled["status"] == "committed"
    return server
