"""What findings mean, without any machine."""

import pytest

from pipedream_rt.doctor.judgement import MeasuredLink, judge, options_of_planner

FINE = {
    "software": "torch 2", "processor": "a kind", "source": "12ab", "memory": 8 << 30,
    "shm": 1 << 30, "shares": True, "files": 4096, "files_at_most": 4096, "accelerator": "",
    "folder": "ok",
}  # fmt: skip
FAST = MeasuredLink(1e-4, 1e9)


def bad(findings):
    return {(each.check, each.where): each for each in findings if each.grade != "ok"}


def test_machines_that_fit():
    machines = {"first": FINE, "node-1": FINE}
    links = {("first", "node-1"): FAST, ("node-1", "first"): FAST}
    found = judge(machines, links, {"node-1": 0.01}, 2, {"node-1": ("10.0.0.2", "10.0.0.2")})
    assert bad(found) == {}
    assert all(each.remedy == "" for each in found)
    assert options_of_planner(links) == "--bandwidth 8000Mbit --latency 0.1ms"


@pytest.mark.parametrize(
    ("change", "check", "grade"),
    [
        ({"software": "torch 1"}, "software", "fail"),
        ({"source": "other"}, "source", "fail"),
        ({"processor": "another"}, "processor", "warn"),
        ({"folder": "No such file: /run"}, "shared folder", "fail"),
        ({"memory": 1 << 20}, "memory", "warn"),
        ({"shm": 0}, "/dev/shm", "note"),
        ({"shares": False}, "shared memory", "note"),
        ({"files": 256}, "open files", "warn"),
    ],
)
def test_what_does_not_fit_names_the_machine_and_what_to_do(change, check, grade):
    machines = {"first": FINE, "node-1": FINE, "node-2": {**FINE, **change}}
    ((where, found),) = bad(judge(machines, {}, {}, 3)).items()
    assert where == (check, "node-2")
    assert found.grade == grade
    assert found.remedy


@pytest.mark.parametrize(("asks", "wish"), [(False, ""), (True, ""), (False, "on")])
def test_torch_rpc_is_for_who_asks_or_insists(asks, wish):
    machine = {**FINE, "rpc": "filter", "rpc_wish": wish}
    found = bad(judge({"a": machine}, {}, {}, 1, rpc=asks))
    assert [check for check, _ in found] == (["torch RPC"] if asks or wish else [])
    assert all("CAP_NET_ADMIN" in each.remedy for each in found.values())


@pytest.mark.parametrize(
    ("obstacle", "wish", "grade", "words"),
    [
        ("", "", "ok", "workers can be its endpoints, behind a fence"),
        ("filter", "off", "ok", "PIPEDREAM_RT_RPC is off"),
        ("filter", "", "note", "left out, which only references to modules need: "),
        ("filter", "on", "warn", "has no fence: "),
        ("taken", "on", "fail", "cannot be had: "),
    ],
)
def test_what_torch_rpc_lacks_counts_by_what_the_user_wants(obstacle, wish, grade, words):
    machine = {**FINE, "rpc": obstacle, "rpc_wish": wish}
    (found,) = [each for each in judge({"a": machine}, {}, {}, 1, rpc=True) if "RPC" in each.check]
    assert (found.grade, found.where) == (grade, "a")
    assert words in found.text


def test_machines_clocks_addresses_and_links():
    links = {
        ("a", "b"): FAST, ("b", "a"): FAST, ("a", "c"): MeasuredLink(1e-3, 1e8),
        ("c", "a"): MeasuredLink(None, 0.0, "10.0.0.1:4 cannot be reached: timed out"),
    }  # fmt: skip
    found = bad(judge({"a": FINE}, links, {"b": -90.0}, 3, {"b": ("10.0.0.2", "192.0.2.1")}))
    assert {where: each.grade for where, each in found.items()} == {
        ("machines", ""): "fail",
        ("clock", "b"): "warn",
        ("address", "b"): "warn",
        ("link", "a -> c"): "warn",
        ("link", "c -> a"): "fail",
    }
    assert "1 of 3 have come" in found["machines", ""].text
    assert "90 s behind" in found["clock", "b"].text
    assert "let all ports through" in found["link", "c -> a"].remedy


def test_no_link_says_nothing_to_the_planner():
    assert options_of_planner({("a", "b"): MeasuredLink(None, 0.0, "no")}) == ""
