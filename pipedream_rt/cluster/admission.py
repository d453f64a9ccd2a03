"""Admission: whether a worker that says hello becomes a member of the group."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from typing import NamedTuple

from pipedream_rt.cluster.addresses import boot_id
from pipedream_rt.cluster.control import VERSION, Control
from pipedream_rt.cluster.control_records import HELLO, Record
from pipedream_rt.cluster.keys import COORDINATOR_END, WORKER_END, Handshake
from pipedream_rt.cluster.members import Member
from pipedream_rt.schema import printable, problem_of
from pipedream_rt.software import software


class Refusal(NamedTuple):
    """Why a worker cannot become a member.

    Attributes:
        passing: Whether the worker may try again later.
        proven: Whether the worker has proved that it knows the job's secret.
    """

    reason: str
    passing: bool = False
    proven: bool = False


def talk_of(control: Control, hello: Record, asked: bytes, key: bytes) -> Handshake:
    """Return what both ends of the connection know, if the one that says hello has the key."""
    answer = hello.get("nonce")
    return Handshake(key, asked, answer if isinstance(answer, bytes) else b"", control.channel)


def refusal_of(hello: Record, talk: Handshake, members: Iterable[Member]) -> Refusal | None:
    """Why a worker cannot become a member; None if it can."""
    if hello.get("type") != "hello":
        return Refusal(f"its first record is {hello.get('type')!r}, where 'hello' was expected")
    # The version comes first: which fields a hello has depends on it.
    if hello.get("version") != VERSION:
        spoken = printable(repr(hello.get("version")), 20)
        return Refusal(
            f"it speaks protocol {spoken}, the coordinator {VERSION}; install the same "
            "pipedream-rt on all machines"
        )
    if problem := problem_of(hello, HELLO):
        return Refusal(f"its hello makes no sense: {problem}")
    if not hmac.compare_digest(talk.prove(hello), hello["proof"]):
        return Refusal(
            "it does not know the job's secret; give it the same PIPEDREAM_RT_SECRET, unless "
            "somebody is in between"
        )
    # Only who has proved the secret learns which names are taken, and the script's software.
    name = hello["name"]
    twin = next((member for member in members if member.name == name), None)
    if twin is not None:
        reason = f"the name {name!r} is taken by {twin.description}; give each worker its own"
        return Refusal(reason, passing=True, proven=True)
    if hello["software"] != software():
        reason = (
            f"it has {hello['software']}, and the script {software()}; its stages might compute "
            "other bits, so install the same on all machines"
        )
        return Refusal(reason, proven=True)
    return None


def admit(control: Control, hello: Record, talk: Handshake) -> Member:
    """Tell a worker that it is a member; all further records of its connection are signed."""
    name = hello["name"]
    control.send({"type": "admitted", "proof": talk.prove_admission()})
    control.peer = f"worker {name!r}"
    # Only now: "admitted" itself is not signed, as its proof shows the worker who has sent it.
    control.secure(talk.session_key(), COORDINATOR_END, WORKER_END)
    # Where the kernel has no id, both are empty, which shows nothing.
    same_clock = hello.get("boot") == boot_id() != ""
    returns = control.is_local or hello["returns"]  # workers started here are started again
    return Member(name, process_of(hello), control, same_clock=same_clock, returns=returns)


def process_of(hello: Record) -> str:
    """Process number and machine of a worker, in words; escaped, as anybody may have sent them."""
    return printable(f"pid {hello.get('pid')} on {hello.get('host')}", 100)
