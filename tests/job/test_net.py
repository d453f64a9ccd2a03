"""What the script has changed is found by the net, refused or said, and at a bounded cost."""

import logging
import types

import pytest
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.job.net import Net
from pipedream_rt.job.own_model import OwnModel
from pipedream_rt.job.unsplit_model import UnsplitModel
from pipedream_rt.models.parcel import Parcel

OWN = types.ModuleType("own_values")


class Config:
    def __init__(self):
        self.beta, self.note, self.calls = 1.0, "", 0


@pytest.fixture(autouse=True)
def values():
    OWN.BETA, OWN.CONF, OWN.MEMO, OWN.LIST = 1.0, Config(), {"a": 1.0}, [1.0]


def loss(output, target):
    OWN.CONF.calls += 1
    return output * OWN.BETA * OWN.CONF.beta * OWN.MEMO["a"] * OWN.LIST[0]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def net(root=loss, shared=False, clock=None, fixed=(), read=()):
    model = nn.Sequential(nn.Linear(2, 2))
    parcel = Parcel([("loss_fn", root)])
    made = Net(
        OwnModel(UnsplitModel(model)), [parcel], [], Parcel(fixed), Parcel([]), model, dict(read),
        shared=shared, clock=clock or Clock(),
    )  # fmt: skip
    return made, model, parcel


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda: setattr(OWN, "BETA", 2.0), "'BETA' of the module own_values"),
        (lambda: setattr(OWN.CONF, "beta", 2.0), "'beta' of 'CONF' of the module"),
        (lambda: OWN.MEMO.update(a=2.0), "'a' of 'MEMO' of the module"),
        (lambda: OWN.LIST.__setitem__(0, 2.0), "0 of 'LIST' of the module"),
    ],
)
def test_what_workers_have_by_name_may_not_change(change, words, shared):
    made, *_ = net(shared=shared)
    made.cast()
    change()
    for _ in range(2):  # until it is taken back
        with pytest.raises(ConfigError, match=f"the script has changed {words}.*workers have"):
            made.cast()


def fill():
    OWN.MEMO["b"] = 3.0


def count():
    OWN.CONF.calls += 1


@pytest.mark.parametrize("change", [fill, count])
def test_what_a_call_by_the_script_may_have_done_is_said_once(change, caplog):
    made, *_ = net()
    for _ in range(3):
        change()
        made.cast()
    assert len(caplog.records) == len({record.getMessage() for record in caplog.records}) <= 2
    assert "more than a cache" in caplog.text


def test_stages_in_this_process_do_it_too_so_nothing_is_said(caplog):
    made, *_ = net(shared=True)
    count()
    fill()
    made.cast()
    assert not caplog.records


def test_another_forward_of_a_module_is_refused():
    layer = nn.Linear(2, 2)
    made, *_ = net(layer)
    made.cast()
    layer.forward = lambda x: x
    with pytest.raises(ConfigError, match="'forward' of loss_fn"):
        made.cast()


def test_what_no_code_names_may_change(caplog):
    caplog.set_level(logging.INFO)
    made, *_ = net()
    OWN.CONF.note = "best so far"
    OWN.OTHER = 3
    made.cast()
    assert not caplog.records


def test_what_travels_is_left_to_the_look():
    config = Config()

    def of_script(output, target):
        return output * config.beta

    made, _, parcel = net(of_script)
    made._travelling = {id(holder): holder for holder in parcel.found.values() if holder.travels}
    config.beta = 2.0
    made.cast()


def test_what_an_object_holds_is_read_where_code_names_what_leads_to_it():
    OWN.CONF.note = Config()
    made, _, parcel = net()
    holders = {id(holder.value): holder for holder in parcel.found.values()}
    assert made.reads(holders[id(OWN.CONF)])
    assert not made.reads(holders[id(OWN.CONF.note)])


def test_nothing_of_what_is_fixed_may_change():
    config = Config()
    made, *_ = net(fixed=[("Correction", config)])
    config.note = "any"
    with pytest.raises(ConfigError, match=r"'note' of Correction.*that nobody can reach"):
        made.cast()


def test_what_a_recorded_forward_has_read_may_not_change():
    made, model, _ = net(read={("0", "in_features"): 2})
    made.cast()
    model[0].in_features = 3
    with pytest.raises(ConfigError, match=r"'in_features' of 0 .*recorded"):
        made.cast()


def test_a_walk_waits_until_a_hundred_times_its_cost_has_passed(monkeypatch):
    clock, walks = Clock(), []
    made, *_ = net(clock=clock)

    def compare():
        walks.append(clock.now)
        clock.now += 0.1

    monkeypatch.setattr(made, "_compare", compare)
    for _ in range(20):
        made.cast()
    assert len(walks) == 2  # those that take no more than a quarter of a second together
    assert made.waits
    clock.now += 9.9
    assert not made.cast()
    assert len(walks) == 2
    clock.now += 0.2
    assert made.cast()
    assert len(walks) == 3
    assert not made.waits
    assert made.cast(at_last=True)
