"""A schedule as a user would write it."""

from pipedream_rt.schedules import Action, Kind


class LaterBackward:
    """A user's schedule: 1F1B with one forward more ahead than needed, flushed."""

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
