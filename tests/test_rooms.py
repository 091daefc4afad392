"""How the parts stand to one another: floors, and inside a floor nothing that imports upward."""

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]
FLOORS = ("offload", "phases", "planner", "cli")


def imported(file: Path) -> Iterator[tuple[str, ...]]:
    """The modules of ours that a file imports when it is imported, by their path from the root."""
    package = file.relative_to(ROOT).parent.parts
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - (node.level - 1)]
            module = tuple((node.module or "").split(".")) if node.module else ()
            yield from ((*base, *module, alias.name) for alias in node.names)


def entries(folder: Path) -> nx.DiGraph:
    """The entries of a folder, a folder in it as one; an edge leads to what is imported."""
    found: nx.DiGraph = nx.DiGraph()
    here = folder.relative_to(ROOT).parts
    for file in folder.rglob("*.py"):
        if file.name == "__init__.py":
            continue
        mine = file.relative_to(folder).with_suffix("").parts[0]
        found.add_node(mine)
        for path in imported(file):
            if path[: len(here)] == here and len(path) > len(here) and path[len(here)] != mine:
                found.add_edge(mine, path[len(here)])
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_only_floors_below_it(floor):
    above = FLOORS[FLOORS.index(floor) + 1 :]
    upward = [
        (str(file.relative_to(ROOT)), path)
        for file in (ROOT / floor).rglob("*.py")
        for path in imported(file)
        if path[0] in above
    ]
    assert upward == []


@pytest.mark.parametrize(
    "folder",
    sorted(
        str(each.parent.relative_to(ROOT))
        for f in FLOORS
        for each in ROOT.glob(f"{f}/**/__init__.py")
    ),
)
def test_nothing_in_a_folder_imports_upward_and_no_folder_is_split(folder):
    assert [*nx.simple_cycles(entries(ROOT / folder))] == []


def test_the_house_has_no_more_rooms_than_a_newcomer_can_keep_in_mind():
    assert len([file for f in FLOORS for file in (ROOT / f).rglob("*.py")]) <= 100
    entries_of_planner = [e for e in (ROOT / "planner").iterdir() if e.name != "__pycache__"]
    assert len(entries_of_planner) <= 16


def test_no_file_of_the_planner_names_what_only_a_host_knows():
    names = ("DiffusersPipeline", "Placement", "Conductor", "LayerwiseOffload", "CudaDevice")
    found = {
        (file.name, name)
        for file in (ROOT / "planner").rglob("*.py")
        for name in names
        if name in file.read_text(encoding="utf-8")
    }
    assert found <= {("dry_run.py", "CudaDevice")}
