"""Messages for tests, whose kind is that of their payload."""

import queue

from pipedream_rt.messages.head import WITH_LOSS, Head, MiniBatch, Mode
from pipedream_rt.messages.message import PAYLOADS, Gradient, Key, Message, OfRule
from pipedream_rt.schedules.edges import Edge

_KINDS = {cls: kind for kind, cls in PAYLOADS.items() if cls is not OfRule}


def message(payload, *, to, sender, number, generation=0, tensors=(), kind=None):
    edge = Edge(kind or _KINDS[type(payload)], sender, to)
    return Message(
        key=Key(edge, number), generation=generation, payload=payload, tensors=tuple(tensors)
    )


def head(micro_batch, hyper=None, *, position=None, mode=Mode.TRAIN, **fields):
    """Of a micro-batch at the position of its number; one group, whose hyper-parameters stay."""
    if hyper is None:
        hyper = [{}] if mode is Mode.TRAIN else []
    return Head(
        position=micro_batch if position is None else position,
        micro_batch=micro_batch,
        mode=mode,
        mini_batch=MiniBatch(hyper, []),
        has_target=mode in WITH_LOSS,
        **fields,
    )


def gradient(index, *tensors, to=1, sender=0):
    """A message of stage 0 to stage 1, if nothing else is said."""
    payload = Gradient(present=[True] * len(tensors))
    return message(payload, to=to, sender=sender, number=index, generation=1, tensors=tensors)


class End:
    """An address, with what arrived and what was lost."""

    def __init__(self, transport, address):
        self.arrived, self.lost = queue.SimpleQueue(), queue.SimpleQueue()
        transport.open(address, self.arrived.put, self.lost.put)
