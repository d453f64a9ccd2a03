"""The judge of the checker: it finds out by brute force whether orders are legal.

It imports nothing of the project, and knows the rules of orders, but no bounds and no versions.
"""


def legal(orders, workers, stages, k, micro_batches):
    """Return whether orders are legal: a list of (letter, index, stage) for each worker."""
    done = set()
    places = [0] * workers
    moved = True
    while moved:
        moved = False
        for w in range(workers):
            while places[w] < len(orders[w]) and _may(orders[w][places[w]], done, stages, k):
                done.add(orders[w][places[w]])
                places[w] += 1
                moved = True
    if any(place < len(order) for place, order in zip(places, orders)):
        return False
    split = any(letter == "I" for letter, _, _ in done)
    letters = "FIW" if split else "FB"
    wanted = {(x, m, s) for x in letters for m in range(micro_batches) for s in range(stages)}
    wanted |= {("S", t, s) for t in range(micro_batches // k) for s in range(stages)}
    return done == wanted


def _may(action, done, stages, k):
    letter, i, s = action
    if action in done or (i and (letter, i - 1, s) not in done):
        return False
    if letter == "F":
        return s == 0 or ("F", i, s - 1) in done
    if letter in "BI":
        after = s == stages - 1 or (letter, i, s + 1) in done
        return after and ("F", i, s) in done
    if letter == "W":
        return ("I", i, s) in done
    ends = [m for m in range((i + 1) * k) if not {("B", m, s), ("W", m, s)} & done]
    early = {("B", (i + 1) * k, s), ("W", (i + 1) * k, s)} & done
    return not ends and not early
