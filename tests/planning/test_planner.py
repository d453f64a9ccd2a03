"""The partitions that a user may choose from, the best one first."""

import pytest
from support.profiles import chain, machines, two_servers

from pipedream_rt.errors import ConfigError
from pipedream_rt.planning.alternatives import choices_text, partition_text
from pipedream_rt.planning.cuts import cuts_of
from pipedream_rt.planning.machines import LinkCodec, Machines, Worker
from pipedream_rt.planning.planner import DATA_PARALLEL, partitions


def test_choices_are_compared_by_what_they_are_worth():
    cuts = cuts_of(chain(1, 1, 1, 1))
    found = partitions(cuts, machines(4), replicas=1)
    assert [each.schedule for each in found[:2]] == ["async-1f1b", "2bw"]
    assert found[0].shape == "1-1-1-1"
    assert {each.schedule for each in found} == {"async-1f1b", "2bw", "1f1b", DATA_PARALLEL}
    stale = partitions(cuts, machines(4), replicas=1, slowdown=((0.0, 1.0), (1.0, 9.0)))
    assert stale[0].staleness == 0
    assert stale == sorted(stale, key=lambda each: -each.worth)
    text = choices_text(found) + partition_text(found[0])
    assert all(each.schedule in text for each in found)


def test_data_parallelism_uses_the_workers_that_hold_the_model_and_are_fast_enough():
    profile = chain(2, 2, parameter_bytes=100.0)
    workers = (Worker(speed=0.1), Worker(memory=300.0), Worker(), Worker())
    found = partitions(
        cuts_of(profile), Machines(workers=workers), choices=[DATA_PARALLEL], per_update=2
    )
    assert found[0].stages[0].workers == (2, 3)
    assert found[0].throughput == pytest.approx(0.5)


def test_what_no_choice_can_do_says_why_for_each():
    cuts = cuts_of(chain(1, parameter_bytes=100.0))
    tiny = Machines(workers=(Worker(memory=10.0),))
    with pytest.raises(
        ConfigError, match=r"async-1f1b: no plan fits[\s\S]*data-parallel: the whole"
    ):
        partitions(cuts, tiny)
    with pytest.raises(ConfigError, match="not for 'gpipe'"):
        partitions(cuts, tiny, choices=["gpipe"])


def test_a_codec_is_chosen_for_the_link_on_which_it_pays():
    profile = chain(*[0.01] * 4, output_bytes=1e6)
    options = {"choices": ["async-1f1b"], "per_update": 8, "replicas": 1, "workers": [4]}
    plain = partitions(cuts_of(profile), two_servers(None), **options)[0]
    codec = LinkCodec(ratio=0.25, seconds_per_byte=1e-9)
    coded = partitions(cuts_of(profile), two_servers(codec), **options)[0]
    assert [stage.coded for stage in coded.stages] == [False, True, False, False]
    assert coded.codecs("int8") == {(1, 2): "int8"}
    assert plain.codecs("int8") == {}
    assert coded.stages[1].transfer == pytest.approx(1e6 * (0.25 / 25e6 + 1e-9))
    assert coded.throughput > 2 * plain.throughput
    assert "the codec pays, as Layout(codecs={(1, 2): codec})" in partition_text(coded)
    assert "codec" not in partition_text(plain)


def test_a_codec_that_takes_longer_than_the_link_is_not_chosen():
    profile = chain(*[0.01] * 4, output_bytes=1e6)
    slow = LinkCodec(ratio=0.25, seconds_per_byte=1e-6)
    found = partitions(cuts_of(profile), two_servers(slow), choices=["async-1f1b"], workers=[4])[0]
    assert found.codecs("int8") == {}


def test_a_number_of_workers_that_no_plan_has_is_refused_with_those_there_are():
    with pytest.raises(
        ConfigError, match=r"no plan uses 3 or 4 workers; there are plans for 1, 2$"
    ):
        partitions(
            cuts_of(chain(1, 1)), machines(4), choices=["async-1f1b"], replicas=1, workers={4, 3}
        )


def test_data_parallelism_has_a_replica_on_as_many_workers_as_may_be_used():
    cuts = cuts_of(chain(1, 1))
    options = {"choices": [DATA_PARALLEL], "per_update": 4}
    for allowed, most in (({1}, 1), ({1, 2}, 2), ({2, 3}, 2), (None, 4)):  # 3 share 4 unevenly
        (found,) = partitions(cuts, machines(4), workers=allowed, **options)
        assert found.workers == most
    with pytest.raises(ConfigError, match=r"no plan uses 3 workers; there are plans for 1, 2$"):
        partitions(cuts, machines(4), workers={3}, replicas=2, **options)


def test_an_update_has_as_many_micro_batches_as_there_are_workers_unless_the_user_says():
    cuts = cuts_of(chain(1, 1, 1))
    assert {each.per_update for each in partitions(cuts, machines(3), replicas=1)} == {3}
    assert {each.per_update for each in partitions(cuts, machines(3), per_update=5)} == {5}
