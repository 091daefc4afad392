import networkx as nx
import pytest

from residency.offload.errors import PhaseError
from residency.phases.graph import ComponentUse, Phase, PhaseGraph


def graph(text):
    """`a:x,y b:z` has the phases a and b; x and y are used in a, z in b."""
    phases = [phase.split(":") for phase in text.split()]
    return PhaseGraph(
        Phase(name, tuple(ComponentUse(name, each) for each in components.split(",")))
        for name, components in phases
    )


def use(graph, phase, component):
    return graph.uses_in(phase)[component]


def gap(graph, phase, component):
    """Phases in between, the phase of the next use, and whether it wraps."""
    found = graph.gap(use(graph, phase, component))
    assert found.use == use(graph, phase, component)
    return found.phases, found.next_use.phase, found.wraps


def test_phases_stand_in_the_order_of_a_request():
    assert graph("c:x a:y b:z").phases == ("c", "a", "b")
    assert graph("c:x a:y b:z").first == "c"


def test_requests_repeat_so_the_phases_are_a_cycle():
    cycle = graph("a:x b:y c:z").graph
    assert nx.is_directed_acyclic_graph(cycle) is False
    assert list(cycle.edges(data="wraps")) == [
        ("a", "b", False),
        ("b", "c", False),
        ("c", "a", True),
    ]


def test_after_the_last_phase_comes_the_first():
    assert [graph("a:x b:y c:z").after(phase) for phase in "abc"] == ["b", "c", "a"]


def test_a_single_phase_follows_itself():
    assert list(graph("a:x").graph.edges(data="wraps")) == [("a", "a", True)]
    assert graph("a:x").after("a") == "a"


def test_uses_are_those_of_all_phases_in_order():
    found = [(each.phase, each.component) for each in graph("a:x,y b:x c:z").uses]
    assert found == [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")]


@pytest.mark.parametrize(
    ("phase", "component", "between"),
    [("a", "x", ("b", "c")), ("b", "y", ("c", "a")), ("c", "z", ("a", "b"))],
)
def test_the_gap_of_a_single_use_wraps_through_all_other_phases(phase, component, between):
    assert gap(graph("a:x b:y c:z"), phase, component) == (between, phase, True)


def test_of_two_uses_in_a_request_one_gap_lies_inside_and_the_other_wraps():
    encodes_and_decodes = graph("encode:vae text:te denoise:dit decode:vae")
    assert gap(encodes_and_decodes, "encode", "vae") == (("text", "denoise"), "decode", False)
    assert gap(encodes_and_decodes, "decode", "vae") == ((), "encode", True)


def test_the_gap_of_a_late_second_use_reaches_over_the_end_of_the_request():
    early = graph("text:te encode:vae denoise:dit decode:vae save:x")
    assert gap(early, "decode", "vae") == (("save", "text"), "encode", True)


def test_a_component_used_in_adjacent_phases_has_no_phase_in_between():
    assert gap(graph("a:x b:x c:y"), "a", "x") == ((), "b", False)
    assert gap(graph("a:x b:x c:y"), "b", "x") == (("c",), "a", True)


def test_the_gap_in_an_only_phase_is_the_gap_between_requests():
    assert gap(graph("a:x,y"), "a", "y") == ((), "a", True)


def test_the_gaps_of_a_component_and_its_phases_fill_the_cycle():
    phases = graph("a:x b:y c:x,z d:y e:z")
    for component in "xyz":
        uses = [each for each in phases.uses if each.component == component]
        gaps = [phases.gap(each) for each in uses]
        assert sum(len(each.phases) for each in gaps) + len(uses) == len(phases.phases)
        assert sum(each.wraps for each in gaps) == 1
        assert {each.next_use.phase for each in gaps} == {each.phase for each in uses}


@pytest.mark.parametrize(
    ("since", "component", "phase"),
    [
        ("a", "x", "a"),
        ("b", "x", "c"),
        ("c", "x", "c"),
        ("d", "x", "a"),
        ("c", "y", "b"),
        ("d", "z", "d"),
    ],
)
def test_a_component_works_in_the_first_phase_from_now_on_that_uses_it(since, component, phase):
    assert graph("a:x b:y c:x d:z").phase_of(component, since=since) == phase


def test_a_component_that_no_phase_uses_is_an_error():
    with pytest.raises(PhaseError, match="w works, and no phase of a → b uses it") as caught:
        graph("a:x b:y").phase_of("w", since="b")
    assert "measure the pipeline again" in caught.value.hint


def test_two_phases_of_one_name_are_an_error():
    with pytest.raises(PhaseError, match="two phases are named a"):
        graph("a:x b:y a:z")


def test_no_phases_are_an_error():
    with pytest.raises(PhaseError, match="no component worked") as caught:
        PhaseGraph([])
    assert caught.value.hint


def test_graphs_are_alike_whose_phases_use_the_same_components():
    phases, other = graph("a:x b:y,z"), graph("a:x b:y,z")
    assert phases.is_like(other)


@pytest.mark.parametrize("other", ["a:x", "b:y,z a:x", "a:x b:y", "a:x c:y,z", "a:x b:y,z c:x"])
def test_graphs_with_other_phases_or_components_are_not_alike(other):
    assert not graph("a:x b:y,z").is_like(graph(other))
    assert not graph(other).is_like(graph("a:x b:y,z"))
