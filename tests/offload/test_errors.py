import re

import pytest

from residency.offload import errors
from residency.offload.errors import ResidencyError, UnknownNameError

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ResidencyError)
}


def tree() -> dict[str, str | None]:
    """Each error in the module's docstring, and the one that it hangs from there."""
    parents: dict[str, str | None] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        entry = re.match(r"[ │├└─]*\b(\w+Error)\b(?!`)", line)
        if entry:
            depth = entry.start(1)
            above = [(at, name) for at, name in above if at < depth]
            parents[entry[1]] = above[-1][1] if above else None
            above.append((depth, entry[1]))
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    bases = {name: kind.__bases__[0].__name__ for name, kind in CLASSES.items()}
    assert tree() == bases | {"ResidencyError": None}


@pytest.mark.parametrize("kind", [k for k in CLASSES.values() if k is not UnknownNameError])
def test_every_error_says_what_happened_and_then_the_hint(kind: type[ResidencyError]):
    assert str(kind("it broke", hint="mend it")) == "it broke\nhint: mend it"


def test_an_error_without_a_hint_is_its_message():
    assert str(ResidencyError("it broke")) == "it broke"


def test_an_unknown_name_is_answered_with_those_that_are_close():
    error = UnknownNameError("component", "text_encodr", ["text_encoder", "vae"], hint="look it up")
    assert error.message == "there is no component 'text_encodr'"
    assert error.hint == "did you mean 'text_encoder'?; look it up"
    assert error.known == ("text_encoder", "vae")


@pytest.mark.parametrize(("known", "listed"), [(["dit", "vae"], "dit, vae"), ([], "none")])
def test_an_unknown_name_with_none_close_is_answered_with_all(known: list[str], listed: str):
    assert UnknownNameError("component", "xyz", known).hint == f"known: {listed}"
