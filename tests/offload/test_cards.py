from dataclasses import FrozenInstanceError, astuple

import pytest

from residency.offload.cards import CARDS, GIB, Card, custom_card, find_card
from residency.offload.errors import InputError, UnknownNameError

NOMINAL_GIB = {
    "RTX 3060 12GB": 12,
    "RTX 3080 10GB": 10,
    "RTX 3090": 24,
    "RTX 4060 Ti 16GB": 16,
    "RTX 4070": 12,
    "RTX 4070 Ti SUPER": 16,
    "RTX 4080": 16,
    "RTX 4090": 24,
    "RTX 5060 Ti 16GB": 16,
    "RTX 5070": 12,
    "RTX 5070 Ti": 16,
    "RTX 5080": 16,
    "RTX 5090": 32,
    "RTX A5000": 24,
    "RTX A6000": 48,
    "RTX 6000 Ada": 48,
    "RTX PRO 6000 Blackwell": 96,
    "T4": 16,
    "L4": 24,
    "L20": 48,
    "L40S": 48,
    "A10": 24,
    "A100 40GB": 40,
    "A100 80GB": 80,
    "H100 80GB": 80,
    "H200": 141,
    "B200": 180,
    "V100 32GB": 32,
}

every_card = pytest.mark.parametrize("card", CARDS.values(), ids=list(CARDS))


def with_bus(generation: int, lanes: int) -> Card:
    bus = (card for card in CARDS.values() if card.pcie_generation == generation)
    return next(card for card in bus if card.pcie_lanes == lanes)


def test_the_catalogue_is_large_enough_to_find_ones_card_in():
    assert len(CARDS) >= 24
    assert CARDS.keys() == NOMINAL_GIB.keys()


def test_a_card_is_listed_under_its_own_name():
    assert all(card.name == name for name, card in CARDS.items())


@every_card
def test_every_figure_of_a_card_says_where_it_is_from(card: Card):
    *texts, total_is_estimate = astuple(card.sources)
    assert all(len(text) > 10 for text in texts)
    assert total_is_estimate == card.sources.total.startswith("estimate: ")
    assert total_is_estimate or card.sources.total.startswith("https://github.com/")


@every_card
def test_a_driver_reports_less_than_the_nominal_size_but_not_by_much(card: Card):
    nominal_bytes = NOMINAL_GIB[card.name] * GIB
    assert 0.9 * nominal_bytes < card.total_bytes < nominal_bytes


@every_card
def test_a_catalogued_card_has_a_memory_bandwidth_faster_than_its_bus(card: Card):
    assert card.memory_bandwidth_bytes_per_s is not None
    assert card.memory_bandwidth_bytes_per_s > 4 * card.pcie_bytes_per_s


def test_the_two_cards_of_the_motivating_case_have_its_totals():
    assert CARDS["RTX 4090"].total_bytes == round(23.52 * 2**30)
    assert CARDS["RTX 5090"].total_bytes == round(31.4 * 2**30)


def test_only_cards_whose_tensor_cores_lack_bf16_have_no_bf16_rate():
    assert {n for n, card in CARDS.items() if card.bf16_flops_per_s is None} == {"T4", "V100 32GB"}


def test_bf16_rates_are_dense():
    assert CARDS["A100 80GB"].bf16_flops_per_s == 312 * 10**12
    assert CARDS["RTX 4090"].bf16_flops_per_s == 165_200_000_000_000


def test_gen_4_x16_moves_31_5_gb_per_second_each_way():
    by_hand = 16e9 * 16 * 128 / 130 / 8
    assert with_bus(4, 16).pcie_bytes_per_s == int(by_hand) == 31_507_692_307


def test_gen_5_x16_moves_63_0_gb_per_second_each_way():
    by_hand = 32e9 * 16 * 128 / 130 / 8
    assert with_bus(5, 16).pcie_bytes_per_s == int(by_hand) == 63_015_384_615


def test_half_the_lanes_are_half_the_rate():
    assert with_bus(4, 8).pcie_bytes_per_s == with_bus(4, 16).pcie_bytes_per_s // 2


@every_card
def test_a_card_is_found_in_any_case_and_spacing(card: Card):
    for name in (card.name, card.name.upper(), card.name.lower(), card.name.replace(" ", "")):
        assert find_card(name) is card


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("rtx4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        (" rtx-4070 ti super ", "RTX 4070 Ti SUPER"),
        ("a6000", "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("Tesla T4", "T4"),
    ],
)
def test_what_drivers_and_people_call_a_card_finds_it(given: str, name: str):
    assert find_card(given).name == name


@pytest.mark.parametrize("given", ["A100", "a100", "NVIDIA A100"])
def test_a_name_that_fits_two_sizes_is_refused_with_both(given: str):
    with pytest.raises(UnknownNameError) as caught:
        find_card(given)
    assert "say which size: 'A100 40GB' or 'A100 80GB'" in str(caught.value)


@pytest.mark.parametrize(
    "given", ["RTX 4060 Ti", "RTX 4070 Ti", "RTX 6000", "RTX 4090 Laptop GPU", "L40", "A10G", ""]
)
def test_a_card_that_is_not_listed_is_never_taken_for_a_similar_one(given: str):
    with pytest.raises(UnknownNameError):
        find_card(given)


def test_an_unknown_card_suggests_close_ones_and_a_way_out():
    with pytest.raises(UnknownNameError) as caught:
        find_card("RTX 4091")
    assert "there is no card 'RTX 4091'" in str(caught.value)
    assert "did you mean 'RTX 4090'" in str(caught.value)
    assert "residency cards lists them; --capacity 22GiB takes any other" in str(caught.value)


def test_a_custom_card_is_named_after_its_size_and_states_its_assumption():
    card = custom_card(22 * GIB)
    assert (card.name, card.total_bytes) == ("22.0 GiB card", 22 * GIB)
    assert card.pcie_bytes_per_s == CARDS["RTX 4090"].pcie_bytes_per_s
    assert card.sources.pcie == "assumption: PCIe 4.0 x16"


def test_a_custom_card_claims_no_rates():
    card = custom_card(22 * GIB)
    assert card.memory_bandwidth_bytes_per_s is None
    assert card.bf16_flops_per_s is None


@pytest.mark.parametrize("total_bytes", [0, -1])
def test_a_custom_card_of_no_bytes_is_refused(total_bytes: int):
    with pytest.raises(InputError, match="can't hold anything"):
        custom_card(total_bytes)


def test_a_card_can_not_be_changed():
    with pytest.raises(FrozenInstanceError):
        CARDS["RTX 4090"].total_bytes = 0  # type: ignore[misc]
