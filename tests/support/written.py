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
