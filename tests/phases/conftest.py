import pytest


@pytest.fixture(autouse=True, scope="session")
def _frozen(what_is_imported_is_no_garbage):
    pass
