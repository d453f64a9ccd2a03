import itertools
import threading

import pytest

from pipedream_rt.loading import ahead

pytestmark = pytest.mark.threads


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_items_come_in_order(depth):
    with ahead(range(10), depth) as items:
        assert list(items) == list(range(10))


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_comes_after_the_items_before_it(depth):
    def loader():
        yield 1
        yield 2
        raise KeyError("the loader's own words")

    found = []
    with pytest.raises(KeyError, match="own words"), ahead(loader(), depth) as items:
        found.extend(iter(lambda: next(items), None))
    assert found == [1, 2]


def test_the_loader_runs_ahead_but_no_further_than_told():
    drawn = []
    third = threading.Event()

    def loader():
        for i in itertools.count():
            drawn.append(i)
            if i == 3:
                third.set()
            yield i

    with ahead(loader(), 2) as items:
        assert next(items) == 0
        assert third.wait(10)  # 1 and 2 wait, 3 is in the loader's hands
        assert drawn == [0, 1, 2, 3]


def test_leaving_early_ends_the_thread():
    with ahead(itertools.count(), 2) as items:
        next(items)
    assert "loader" not in {t.name for t in threading.enumerate()}
