"""The judge of the simulator: a discrete-event simulation that always does the earliest action.

It imports nothing of the project's simulator, and takes quadratic time.
"""


def ns(seconds):
    return round(seconds * 1e9)


def slow_simulation(schedule, costs, micro_batches, credits):
    """Return the spans of a run as (stage, letter, index, start, end), sorted."""
    shape = schedule.shape
    n, k, last = shape.num_stages, shape.per_update, shape.num_stages - 1
    orders = [list(schedule.order(w, 0, micro_batches)) for w in range(shape.workers)]
    places, clocks = [0] * shape.workers, [0] * shape.workers
    arrivals, links, spans = {}, {}, []
    losses = {}
    injected = {"clock": 0, "next": 0}

    def per_stage(values, stage):
        return values[stage] if len(values) > 1 else values[0]

    def inject():
        m = injected["next"]
        while m < micro_batches:
            if m % k == 0 and m // k >= credits:
                needed = range((m // k - credits) * k, (m // k - credits + 1) * k)
                if any(i not in losses for i in needed):
                    break
                clock = max([injected["clock"], *(losses[i] for i in needed)])
                injected["clock"] = clock + ns(costs.turnaround)
            injected["clock"] += ns(costs.injection)
            arrivals["F", 0, m] = injected["clock"] + ns(costs.latency)
            m += 1
        injected["next"] = m

    def ready(w):
        action = orders[w][places[w]]
        letter, m = action.kind.value, action.index
        stage = w if action.stage is None else action.stage
        if letter == "F":
            return arrivals.get(("F", stage, m))
        if letter in "BI" and stage < last:
            return arrivals.get(("B", stage, m))
        return 0

    def send(letter, sender, receiver, m, end, size):
        a, b = shape.worker_of(sender), shape.worker_of(receiver)
        if a != b:
            if costs.bandwidth != float("inf"):
                free = max(end, links.get((a, b), 0)) + ns(size / costs.bandwidth)
                links[a, b] = end = free
            end += ns(costs.latency)
        arrivals[letter, receiver, m] = end

    while True:
        inject()
        able = [
            (max(clocks[w], ready(w)), w)
            for w in range(shape.workers)
            if places[w] < len(orders[w]) and ready(w) is not None
        ]
        if not able:
            break
        start, w = min(able)
        action = orders[w][places[w]]
        letter, m = action.kind.value, action.index
        stage = w if action.stage is None else action.stage
        backward = costs.backward
        halves = tuple(tuple(v / 2 for v in samples) for samples in backward)
        times = {
            "F": costs.forward,
            "B": backward,
            "I": costs.input_gradient or halves,
            "W": costs.weight_gradient or halves,
            "S": costs.step,
        }[letter]
        samples = per_stage(times, stage)
        seconds = samples[m % len(samples)]
        if letter == "F" or (letter in "BI" and stage):
            seconds += costs.overhead
        end = start + ns(seconds / per_stage(costs.speed, w))
        if letter == "F" and stage < last:
            send("F", stage, stage + 1, m, end, per_stage(costs.activation_bytes, stage))
        elif letter == "F":
            losses[m] = end + ns(costs.latency)
        elif letter in "BI" and stage:
            size = per_stage(costs.activation_bytes, stage - 1)
            send("B", stage, stage - 1, m, end, size)
        spans.append((stage, letter, m, start, end))
        clocks[w], places[w] = end, places[w] + 1
    assert all(place == len(order) for place, order in zip(places, orders))
    assert n
    return sorted(spans)
