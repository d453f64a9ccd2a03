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
