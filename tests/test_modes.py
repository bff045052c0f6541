"""Which mode is chosen, and which domains it uses."""

import pytest

from gateway.modes import Mode, choose, domains_of
from replica.placement import PlacementDomain


def domain(index: int, *, virtual: bool = False) -> PlacementDomain:
    return PlacementDomain(
        index=index,
        nodes=(index,),
        compute_cpus=(index + 2, index + 4),
        housekeeping_cpus=(index,),
        idle_siblings=(index + 28,),
        virtual=virtual,
    )


DOMAINS = [domain(0), domain(1)]


@pytest.mark.parametrize("mode", Mode)
def test_what_is_asked_for_is_taken(mode: Mode) -> None:
    assert (mode, f"--mode {mode.value}") == choose(mode.value, 2)


def test_one_domain_leaves_no_choice() -> None:
    assert (Mode.SINGLE, "one placement domain") == choose("auto", 1)


def test_without_a_measurement_every_domain_is_used() -> None:
    mode, reason = choose("auto", 4)

    assert Mode.DATA_PARALLEL is mode
    assert "4 placement domains" in reason


def test_single_uses_the_first_domain() -> None:
    assert DOMAINS[:1] == domains_of(Mode.SINGLE, DOMAINS)


def test_data_parallel_uses_all() -> None:
    assert DOMAINS == domains_of(Mode.DATA_PARALLEL, DOMAINS)


def test_span_joins_all_into_one_with_interleaved_memory() -> None:
    (joined,) = domains_of(Mode.SPAN, DOMAINS)

    assert (0, 1) == joined.nodes
    assert (2, 4, 3, 5) == joined.compute_cpus
    assert (0, 1) == joined.housekeeping_cpus
    assert (28, 29) == joined.idle_siblings
    assert joined.interleaved
    assert not joined.virtual


def test_virtual_domains_on_one_node_join_to_that_node() -> None:
    halves = [
        PlacementDomain(0, (0,), (1,), (), (), virtual=True),
        PlacementDomain(1, (0,), (2,), (), (), virtual=True),
    ]
    (joined,) = domains_of(Mode.SPAN, halves)

    assert (0,) == joined.nodes
    assert (1, 2) == joined.compute_cpus
    assert joined.virtual


def test_the_names_are_those_of_the_command_line_and_the_metric() -> None:
    assert ["single", "data-parallel", "span"] == [mode.value for mode in Mode]
