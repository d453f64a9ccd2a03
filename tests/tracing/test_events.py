"""Events: what is written of one is read back; what is none is refused."""

import json
import math
from dataclasses import replace

import pytest
from support.recorded import begun, stepped, whole_run

from pipedream_rt import TraceError
from pipedream_rt.observers import Ended, Evaluated, Stepped
from pipedream_rt.tracing.events import packed, unpacked


@pytest.mark.parametrize("event", whole_run(3), ids=lambda event: type(event).__name__)
def test_an_event_is_read_as_it_was_written(event):
    again = unpacked(json.loads(json.dumps(packed(event), allow_nan=False)))
    if isinstance(event, Evaluated) and math.isnan(event.values["loss"]):
        assert math.isnan(again.values["loss"])
    else:
        assert again == event


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_written_as_strict_json(loss):
    text = json.dumps(packed(stepped(1, loss=loss)), allow_nan=False)
    again = unpacked(json.loads(text)).loss
    assert again == loss or (math.isnan(again) and math.isnan(loss))


ENDED = whole_run(3)[-1]
COUNTERS = begun().stages[0]


@pytest.mark.parametrize(
    ("event", "change"),
    [
        *((stepped(1), change) for change in (
            {"event": "unheard of"}, {"event": None}, {"loss": "much"}, {"step": -1}, {"step": 1.5},
            {"versions": [1, "2"]}, {"time": None}, {"busy_s": 3}, {"time": 10**400},
            {"time": math.inf}, {"time": 1e300}, {"loss": 10**400}, {"rates": [10**400]},
        )),
        *((begun(), change) for change in (
            {"plan": {}}, {"plan": {**begun().plan, "hosts": "many"}},
            {"plan": {**begun().plan, "workers": 2}},
            {"plan": {**begun().plan, "hosts": [0, 1.5, 2]}},
            {"stages": []}, {"stages": [{}, {}, {}]},
            {"stages": [{**COUNTERS, "parameters": "few"}] * 3},
            {"workers": ["alone"]}, {"pid": 2**31},
        )),
        (ENDED, {"stages": [{}] * 3}),
        *((ENDED, {"stages": [{**COUNTERS, **wrong}] * 3}) for wrong in (
            {"parameters": None}, {"weight_bytes": "x"}, {"peak_device_memory_bytes": []},
            {"versions_kept_most": 10**400},
        )),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else type(value).__name__,
)  # fmt: skip
def test_what_is_no_event_or_whose_parts_do_not_fit_is_refused(event, change):
    assert unpacked(packed(event))
    with pytest.raises(TraceError, match="no event"):
        unpacked({**packed(event), **change})


def test_a_missing_field_is_refused_and_an_unknown_one_passed_over():
    """A later version may tell more."""
    record = packed(stepped(1))
    assert unpacked({**record, "of_a_later_version": 1}) == stepped(1)
    del record["loss"]
    with pytest.raises(TraceError, match="no event"):
        unpacked(record)


def test_a_trace_is_told_of_and_not_written():
    event = whole_run(3)[-1]
    assert packed(event)["trace"] is True
    assert packed(replace(event, trace=None))["trace"] is False
    assert unpacked(packed(event)).trace is None


def test_all_kinds_are_there():
    kinds = {type(event) for event in whole_run()}
    assert len(kinds) == 7
    assert {Stepped, Ended} <= kinds
    assert begun().plan["name"] == "async-1f1b"
