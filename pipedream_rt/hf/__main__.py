"""``python -m pipedream_rt.hf``: prints what the installed Trainer can do over a pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from transformers import Trainer, TrainerCallback

from pipedream_rt.hf.arguments import known_arguments
from pipedream_rt.hf.epoch import EVENTS
from pipedream_rt.hf.other_trainers import UNDERSTOOD
from pipedream_rt.hf.overrides import IN_SCRIPT, NEVER_CALLED, REPLACED, SAME


def page() -> str:
    """Return the tables of the page about the Trainer, as Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    arguments = known_arguments()
    yield from _table("Argument", ((n, *found) for n, found in arguments.items() if found[1]))
    same = sum(kind == "same" for kind, _ in arguments.values())
    yield from ("", f"The {same} others are the same, or the Trainer's own matter.", "")
    methods = [n for n in vars(Trainer) if callable(getattr(Trainer, n)) and n[:2] != "__"]
    called = SAME | REPLACED.keys()
    others = [name for name in methods if name not in called]
    yield from _table(
        "Own method",
        (
            (n, "other", IN_SCRIPT[n])
            if n in IN_SCRIPT
            else (n, "refused", NEVER_CALLED.get(n, "not known here"))
            for n in sorted(others)
        ),
    )
    count = len(methods) - len(others)
    yield from ("", f"The {count} others are called as by a plain Trainer.", "")
    events = [name for name in vars(TrainerCallback) if name.startswith("on_")]
    rows = ((name, "other", EVENTS[name]) for name in events if name in EVENTS)
    yield from _table("Event of a callback", rows)
    yield from ("", f"The {len(events) - len(EVENTS)} others are the same.", "")
    yield from _table(
        "Trainer of others",
        (
            (f"{n.split('.')[0]}: {n.split('.')[-1]}", "other", u.other)
            for n, u in UNDERSTOOD.items()
        ),
    )


def _table(head: str, rows: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield the lines of a table; names of which the same is to be said share one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, kind, text in rows:
        alike.setdefault((kind, text), []).append(name)
    yield from (f"| {head} | over a pipeline | |", "|---|---|---|")
    yield from (f"| {_listed(names)} | {kind} | {text} |" for (kind, text), names in alike.items())


def _listed(names: Iterable[str]) -> str:
    """Return names as a list in a sentence."""
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    print(page(), end="")
