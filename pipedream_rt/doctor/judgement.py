"""The judgement on the findings of machines, with remedies. Pure: it asks no machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pipedream_rt.doctor.facts import Facts
from pipedream_rt.tracing.summary import bytes_text, seconds_text
from pipedream_rt.transport.fence import OBSTACLES

Grade = Literal["ok", "note", "warn", "fail"]

_LEAST_MEMORY = 1 << 30
_LEAST_FILES = 1024
_LATEST_CLOCK_S = 1.0
_SLOWER_THAN_MEDIAN = 4.0
"""How many times as slow as the median a link is to be reported."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of what was found.

    Attributes:
        where: The machine or the link; empty for all.
        grade: ``"note"`` is good to know; with ``"fail"`` a job will not run.
        remedy: What to do; empty where nothing need be done.
    """

    check: str
    where: str
    grade: Grade
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A connection from one machine to another, as measured.

    Attributes:
        latency_s: Seconds of a small message one way; None if there was no connection.
        bandwidth: Bytes per second.
        problem: Why there was no connection; empty if there was.
    """

    latency_s: float | None
    bandwidth: float
    problem: str = ""


def judge(
    machines: Mapping[str, Facts],
    links: Mapping[tuple[str, str], MeasuredLink],  # by caller and called
    clocks: Mapping[str, float],  # seconds ahead of the first machine's
    expected: int,
    addresses: Mapping[str, tuple[str, str]] | None = None,  # announced, and seen by the first
    rpc: bool = False,
) -> list[Finding]:
    """Return the findings in the order in which a user would mend them.

    ``rpc`` asks whether references can lead to modules, for which workers need torch RPC.
    """
    found = []
    if len(machines) < expected:
        found.append(
            Finding(
                "machines", "", "fail", f"{len(machines)} of {expected} have come",
                "see what the others say; does a firewall let them reach the port of the first?",
            )
        )  # fmt: skip
    else:
        found.append(Finding("machines", "", "ok", f"{expected} have come"))
    found += _same(machines, "software", "fail", "install the same versions on all machines")
    found += _same(
        machines, "processor", "warn",
        "kernels may round differently on each: bits repeat only on machines of one kind",
    )  # fmt: skip
    found += _same(machines, "source", "fail", "copy the same source files to all machines")
    for name, facts in machines.items():
        found += _of_one(name, facts)
        if rpc or facts.get("rpc_wish") == "on":
            found.append(_of_rpc(name, str(facts.get("rpc", "")), str(facts.get("rpc_wish", ""))))
    found += [_of_clock(name, ahead) for name, ahead in clocks.items()]
    for name, (announced, seen) in (addresses or {}).items():
        found.append(
            Finding("address", name, "ok", announced)
            if announced == seen
            else Finding(
                "address", name, "warn", f"it announces {announced}, and comes from {seen}",
                "a translation of addresses is in between: workers must reach what is announced",
            )
        )  # fmt: skip
    return found + _of_links(links)


def _same(machines: Mapping[str, Facts], key: str, grade: Grade, remedy: str) -> list[Finding]:
    """Compare values that have to be the same everywhere with those of most machines."""
    values = {name: str(facts.get(key, "")) for name, facts in machines.items()}
    (usual, _), *others = Counter(values.values()).most_common() or [("", 0)]
    if not others:
        return [Finding(key, "", "ok", usual)] if usual else []
    return [
        Finding(key, name, grade, f"{value or 'none'}; others have {usual or 'none'}", remedy)
        for name, value in values.items()
        if value != usual
    ]


def _of_one(name: str, facts: Facts) -> list[Finding]:
    """Judge what concerns one machine alone."""
    memory, shm, files = (int(facts.get(key, 0)) for key in ("memory", "shm", "files"))
    most = int(facts.get("files_at_most", files))
    found = [
        Finding("memory", name, "ok", f"{bytes_text(memory)} free")
        if memory >= _LEAST_MEMORY
        else Finding(
            "memory", name, "warn", f"{bytes_text(memory)} free", "end what else runs there"
        ),
        Finding("/dev/shm", name, "ok", f"{bytes_text(shm)} free")
        if shm >= 1 << 26
        else Finding(
            "/dev/shm", name, "note", f"{bytes_text(shm)} free",
            "data loaders with workers need it: mount a larger one (--shm-size for a container)",
        ),
        Finding("shared memory", name, "ok", "large values between workers here go through it")
        if facts.get("shares", True)
        else Finding("shared memory", name, "note", "large values between workers here go over "
                     "sockets", "the kernel gives none (memfd_create), or "
                     "PIPEDREAM_RT_SHARED_MEMORY is off"),
        Finding("open files", name, "ok", f"{files} allowed")
        if files >= _LEAST_FILES
        else Finding(
            "open files", name, "warn", f"{files} allowed, {most} at most",
            f"ulimit -n {min(most, 4096)} before the start",
        ),
        Finding("accelerator", name, "ok", str(facts.get("accelerator") or "none: stages compute "
                                               "on the CPU")),
    ]  # fmt: skip
    shared = str(facts.get("folder", ""))
    if shared == "ok":
        found.append(Finding("shared folder", name, "ok", "is read and written"))
    elif shared:
        found.append(
            Finding(
                "shared folder", name, "fail", shared,
                "mount the same folder everywhere, for one user who may write to it",
            )
        )  # fmt: skip
    return found


def _of_rpc(name: str, obstacle: str, wish: str) -> Finding:
    """Judge whether workers of a machine can be endpoints of torch RPC, behind the fence."""
    left_out = "left out, which only references to modules need"
    what, remedy = OBSTACLES.get(obstacle, ("", ""))  # type: ignore[call-overload]
    if wish == "off":
        return Finding("torch RPC", name, "ok", f"{left_out}: PIPEDREAM_RT_RPC is off")
    if not what:
        return Finding("torch RPC", name, "ok", "workers can be its endpoints, behind a fence")
    if wish == "on" and obstacle == "filter":
        remedy = "CAP_NET_ADMIN gives the fence; without PIPEDREAM_RT_RPC=on it is left out"
        return Finding("torch RPC", name, "warn", f"has no fence: {what}", remedy)
    if wish == "on":
        return Finding("torch RPC", name, "fail", f"cannot be had: {what}", remedy)
    return Finding("torch RPC", name, "note", f"{left_out}: {what}", remedy)


def _of_clock(name: str, ahead_s: float) -> Finding:
    """Judge how far the clock of a machine differs from that of the first."""
    text = f"{seconds_text(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} the first"
    if abs(ahead_s) <= _LATEST_CLOCK_S:
        return Finding("clock", name, "ok", text)
    remedy = "logs and files will have times in another order: run chrony or systemd-timesyncd"
    return Finding("clock", name, "warn", text, remedy)


def _of_links(links: Mapping[tuple[str, str], MeasuredLink]) -> list[Finding]:
    """Judge each link, beside the median of all."""
    rates = sorted(link.bandwidth for link in links.values() if link.latency_s is not None)
    usual = rates[len(rates) // 2] if rates else 0.0
    found = []
    for (caller, called), link in links.items():
        where = f"{caller} -> {called}"
        if link.latency_s is None:
            remedy = "workers meet at ports that the systems choose: let all ports through"
            found.append(Finding("link", where, "fail", link.problem, remedy))
            continue
        text = f"{8 * link.bandwidth / 1e9:.3g} Gbit/s, {seconds_text(link.latency_s)}"
        if link.bandwidth * _SLOWER_THAN_MEDIAN < usual:
            remedy = f"the median is {8 * usual / 1e9:.3g} Gbit/s: look at its card and cable"
            found.append(Finding("link", where, "warn", text, remedy))
        else:
            found.append(Finding("link", where, "ok", text))
    return found


def options_of_planner(links: Mapping[tuple[str, str], MeasuredLink]) -> str:
    """Return options for `pipedream-rt plan`: the least bandwidth and the longest latency."""
    seen = [link for link in links.values() if link.latency_s is not None]
    if not seen:
        return ""
    rate = min(link.bandwidth for link in seen)
    late = max(link.latency_s or 0.0 for link in seen)
    return f"--bandwidth {8 * rate / 1e6:.0f}Mbit --latency {1e3 * late:.3g}ms"
