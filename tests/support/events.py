"""A check of Trace Event JSON: the demands of the format on those kinds of events that are used.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from itertools import pairwise

NEEDED = {
    "X": {"name": str, "ts": float, "dur": float, "pid": int, "tid": int},
    "M": {"name": str, "pid": int, "args": dict},
    "C": {"name": str, "ts": float, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int},
    "t": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": float, "pid": int, "tid": int},
}


def check_trace_events(document):
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    slices = {}
    for event in document["traceEvents"]:
        for name, kind in NEEDED[event["ph"]].items():
            assert isinstance(event[name], kind), (name, event)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
        if event["ph"] == "C":
            assert all(isinstance(v, int | float) for v in event["args"].values())
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
    for event in document["traceEvents"]:
        if event["ph"] in "stf":  # an arrow ties to the slice around it on its track
            around = slices[event["pid"], event["tid"]]
            assert any(begin <= event["ts"] <= end for begin, end in around), event
    for track in slices.values():  # slices of one track nest or follow
        track.sort()
        for (_, end), (begin, _) in pairwise(track):
            assert begin >= end - 1e-6
