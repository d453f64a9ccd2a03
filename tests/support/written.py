"""A schedule as a user would write it."""

from pipedream_rt.schedules import Action, Kind


class LaterBackward:
    """A schedule that a user wrote: 1F1B with a flush, and one warm-up forward more than needed."""

    def order(self, worker, shape, start):
        k = shape.per_update
        ahead = min(shape.workers - worker, k)
        first = start
        while True:
            for i in range(k + ahead):
                if i < k:
                    yield Action(Kind.FORWARD, first + i)
                if i >= ahead:
                    yield Action(Kind.BACKWARD, first + i - ahead)
            yield Action(Kind.STEP, first // k)
            first += k


class RisingSteps:
    """A schedule for stages 0 and 2, and 1 and 3, of two workers, that does lower steps first."""

    def order(self, worker, shape, start):
        stages = shape.stages_of(worker)
        update = start // shape.per_update
        while True:
            every = range(update * shape.per_update, (update + 1) * shape.per_update)
            yield from (Action(Kind.FORWARD, m, s) for s in stages for m in every)
            yield from (Action(Kind.BACKWARD, m, s) for s in reversed(stages) for m in every)
            yield from (Action(Kind.STEP, update, s) for s in stages)
            update += 1


class Late:
    """A version policy, and a schedule: stages that do backwards, or their halves, late.

    A stage does ``ahead`` forwards before its first backward, and each weight half ``behind``
    micro-batches after the input half, so that a forward reads what was made that long before.
    """

    def __init__(self, lags, ahead=(), behind=None, k=1):
        self.lags, self.ahead, self.behind, self.k = lags, ahead, behind, k
        self.num_stages = len(lags)
        self.versions = self

    @classmethod
    def drawn(cls, draw):
        stages, k = draw.choice((2, 2, 3)), draw.choice((1, 1, 2, 3))
        ahead = [draw.choice((0, 1, 2, 3)) for _ in range(stages)]
        if draw.random() < 0.7:  # those may go on
            ahead.sort(reverse=True)
        behind = [draw.choice((0, 0, 1, 2)) for _ in range(stages)] if draw.random() < 0.6 else None
        lags = [a + b for a, b in zip(ahead, behind or [0] * stages, strict=True)]
        if draw.random() < 0.3:
            lags = [max(lags)] * stages
        return cls(lags, ahead, behind, k)

    def order(self, worker, shape, start):
        k, ahead = shape.per_update, self.ahead[worker]
        for m in range(start, start + ahead):
            yield Action(Kind.FORWARD, m)
        m = start
        while True:
            yield Action(Kind.FORWARD, m + ahead)
            if self.behind is None:
                yield Action(Kind.BACKWARD, m)
            else:
                yield Action(Kind.INPUT, m)
            late = m - (self.behind[worker] if self.behind else 0)
            if late >= start:
                if self.behind is not None:
                    yield Action(Kind.WEIGHT, late)
                if (late + 1) % k == 0:
                    yield Action(Kind.STEP, late // k)
            m += 1

    def reads(self, stage, shape, micro_batch):
        return max(0, (micro_batch - self.lags[stage]) // shape.per_update)

    def kept(self, stage, shape):
        return 99

    def in_flight(self, stage, shape):
        return 99

    def require(self, shape):
        pass
