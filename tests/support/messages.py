"""Messages for tests, whose kind is that of their payload."""

from pipedream_rt.messages.message import PAYLOADS, Key, Message, OfRule
from pipedream_rt.schedules.edges import Edge

_KINDS = {cls: kind for kind, cls in PAYLOADS.items() if cls is not OfRule}


def message(payload, *, to, sender, number, generation=0, tensors=(), kind=None):
    edge = Edge(kind or _KINDS[type(payload)], sender, to)
    return Message(
        key=Key(edge, number), generation=generation, payload=payload, tensors=tuple(tensors)
    )
