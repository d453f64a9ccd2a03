"""Which cases of a test with many parameters run in ``make test``: some, with each value."""

from collections import defaultdict


def thinned_out(cases, every):
    """Return the cases to leave out: all but every nth, and but one for each value that these lack.

    Args:
        cases: The parameters of each case, by name.
        every: How many cases one stands for.

    Returns:
        Their places, as a set. Values of a single parameter are left out, as there is nothing else.
    """
    values = [{(name, id(value)) for name, value in case.items()} for case in cases]
    kept = set(range(0, len(cases), every))
    columns = defaultdict(list)
    for case in cases:
        for name, value in case.items():
            columns[name].append(id(value))
    # Parameters that are given together change together, and count as one.
    changes = {tuple(map(each.index, each)) for each in columns.values() if len(set(each)) > 1}
    if len(changes) > 1:
        there = set().union(*(values[place] for place in kept))
        for place, each in enumerate(values):
            if not each <= there:
                kept.add(place)
                there |= each
    return set(range(len(cases))) - kept
