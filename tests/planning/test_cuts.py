import pytest
from hypothesis import given, settings
from support.profiles import ideals_of, passing, profiles

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.cuts import MOST_CUTS, cuts_of, spans
from pipedream_rt.planning.profile import LayerCosts, Profile


def layers(count):
    return tuple(LayerCosts(name=str(i), forward=1.0, output_bytes=2.0**i) for i in range(count))


def before(cuts, cut):
    return frozenset(cuts.layers_between(-1, cut))


@settings(max_examples=100)
@given(profile=profiles(most=6, branches=True))
def test_the_cuts_are_all_ideals(profile):
    cuts = cuts_of(profile)
    assert {before(cuts, i) for i in range(len(cuts))} == set(ideals_of(profile))
    for i in range(len(cuts)):
        assert cuts.passing[i] == passing(profile, before(cuts, i))
        assert cuts.sums("forward")[i] == pytest.approx(
            sum(profile.layers[j].forward for j in before(cuts, i))
        )
        for j in range(len(cuts)):
            assert cuts.includes[i, j] == (before(cuts, i) < before(cuts, j))
            if cuts.includes[i, j]:
                assert i < j
                assert frozenset(cuts.layers_between(i, j)) == before(cuts, j) - before(cuts, i)


def test_a_chain_has_a_cut_behind_each_layer():
    cuts = cuts_of(Profile(layers=layers(3)))
    assert [before(cuts, i) for i in range(3)] == [{0}, {0, 1}, {0, 1, 2}]
    assert cuts.passing.tolist() == [1.0, 2.0, 0.0]


def test_the_order_of_the_profile_can_be_kept():
    profile = Profile(layers=layers(4), edges=((0, 1), (0, 2), (1, 3), (2, 3)))
    assert len(cuts_of(profile)) == 5
    assert len(cuts_of(profile, branches=False)) == 4


def test_too_many_branches_are_cut_in_the_order_of_the_profile():
    wide = 12
    edges = [(0, i) for i in range(1, wide + 1)] + [(i, wide + 1) for i in range(1, wide + 1)]
    profile = Profile(layers=layers(wide + 2), edges=tuple(edges))
    assert 2**wide > MOST_CUTS
    assert len(cuts_of(profile)) == wide + 2
    with pytest.raises(ConfigError, match="more than 2000 ways"):
        cuts_of(profile, branches=True)


def test_layers_that_nothing_joins_stay_in_order():
    profile = Profile(layers=layers(3), edges=((0, 2),))
    assert len(cuts_of(profile)) == 3


def test_a_span_is_a_difference_of_sums():
    found = spans(cuts_of(Profile(layers=layers(3))).sums("output_bytes"))
    assert found[0].tolist() == [1.0, 3.0, 7.0]
    assert found[1].tolist()[1:] == [2.0, 6.0]
