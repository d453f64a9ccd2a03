"""The judge of the simulator: a discrete-event simulation that always does the earliest action.

It imports nothing of the project's simulator, and takes quadratic time.
"""


def ns(seconds):
    return round(seconds * 1e9)


def slow_simulation(schedule, costs, micro_batches, credits):
    """Return the spans of a run as (place, letter, index, start, end), sorted.

    A place is a stage; with replicas these are counted stage by stage, and micro-batch m goes to
    replica m mod r.
    """
    shape = schedule.shape
    n, k, last = shape.num_stages, shape.per_update, shape.num_stages - 1
    counts = shape.replicas or (1,) * n
    places_of = [[sum(counts[:s]) + q for q in range(counts[s])] for s in range(n)]
    stage_of = {place: s for s, mine in enumerate(places_of) for place in mine}

    def place_for(stage, m):
        return places_of[stage][m % counts[stage]]

    def adding(stage, update):
        return {place_for(stage, m) for m in range(update * k, (update + 1) * k)}

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
            arrivals["F", place_for(0, m), m] = injected["clock"] + ns(costs.latency)
            m += 1
        injected["next"] = m

    def ready(w):
        action = orders[w][places[w]]
        letter, m = action.kind.value, action.index
        place = w if action.stage is None else action.stage
        if letter == "F":
            return arrivals.get(("F", place, m))
        if letter in "BI" and stage_of[place] < last:
            return arrivals.get(("B", place, m))
        if letter == "S":
            stage = stage_of[place]
            adds = adding(stage, m)
            came = [arrivals.get(("R", place, (m, other))) for other in adds - {place}]
            if place not in adds:  # its next micro-batch tells it that there is such an update
                later = m * k
                while place_for(stage, later) != place:
                    later += 1
                came += [arrivals.get(("F", place, later))] if later < micro_batches else []
            return None if None in came else max(came, default=0)
        if letter == "T":
            others = [p for p in places_of[stage_of[place]] if p != place]
            came = [arrivals.get(("S", place, (m, other))) for other in others]
            return None if None in came else max(came)
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
        place = w if action.stage is None else action.stage
        stage = stage_of[place]
        backward = costs.backward
        halves = tuple(tuple(v / 2 for v in samples) for samples in backward)
        times = {
            "F": costs.forward,
            "B": backward,
            "I": costs.input_gradient or halves,
            "W": costs.weight_gradient or halves,
            "S": costs.step,
            "R": ((0.0,),),
            "T": ((0.0,),),
            "D": ((0.0,),),
        }[letter]
        samples = per_stage(times, stage)
        seconds = samples[m % len(samples)]
        if letter == "F" or (letter in "BI" and stage):
            seconds += costs.overhead
        shards = shape.shard_optimizer and counts[stage] > 1
        if letter == "R" or (letter == "S" and shards):
            seconds += costs.overhead * (counts[stage] - 1)
        end = start + ns(seconds / per_stage(costs.speed, w))
        if letter == "F" and stage < last:
            size = per_stage(costs.activation_bytes, stage)
            send("F", place, place_for(stage + 1, m), m, end, size)
        elif letter == "F":
            losses[m] = end + ns(costs.latency)
        elif letter in "BI" and stage:
            size = per_stage(costs.activation_bytes, stage - 1)
            send("B", place, place_for(stage - 1, m), m, end, size)
        elif letter == "R" or (letter == "S" and shards):
            size = per_stage(costs.weight_bytes, stage) / (counts[stage] if letter == "S" else 1)
            for other in places_of[stage]:
                if other != place:
                    send(letter, place, other, (m, place), end, size)
        spans.append((place, letter, m, start, end))
        clocks[w], places[w] = end, places[w] + 1
    assert all(place == len(order) for place, order in zip(places, orders))
    assert n
    return sorted(spans)
