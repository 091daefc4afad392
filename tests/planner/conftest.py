import pytest
from settling import Settling


@pytest.fixture(autouse=True, scope="session")
def _frozen(what_is_imported_is_no_garbage):
    pass


@pytest.fixture(scope="session")
def settling(tmp_path_factory):
    """Makes servers, whose starts are here or in processes of their own."""
    made = Settling(tmp_path_factory.mktemp("settling"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def committed(settling):
    """A server whose first start committed."""
    server = settling.server()
    assert server.boots().settled["status"] == "committed"
    return server
