"""Forwards of a model that is no sequence: recorded once for each signature of inputs, then cut."""

import pickle

import pytest
import torch
from torch import nn

from pipedream_rt import ConfigError
from pipedream_rt.batches import recorded_forwards
from pipedream_rt.batches.forwards import Cache
from pipedream_rt.batches.items import Batch
from pipedream_rt.batches.recorded_forwards import RecordedForwards
from pipedream_rt.messages.head import Mode
from pipedream_rt.messages.tree import flat_copy, unflatten
from pipedream_rt.models.cut import find_layers


class Net(nn.Module):
    """Two layers, and a third where it is asked for; the scale goes to the second stage alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(4))

    def forward(self, x, scale=None, more=False, shift=False):
        x = self.b(self.a(x))
        if scale is not None:
            x = x * scale
        if shift:
            x = x + self.unused
        return self.c(x) if more else x


X, SCALE = torch.ones(2, 4), torch.full((2, 4), 2.0)
EXAMPLE = Batch((X, SCALE), {}, None)


def forwards_of(model=None, example=EXAMPLE, own_loss=False, **options):
    """The forwards of a model with two stages, of which the second begins at layer b."""
    model = model or Net()
    made = RecordedForwards(model, find_layers(model), **options)
    made.own_loss = own_loss
    made.begin(example, {Mode.TRAIN: made.record(example, Mode.TRAIN)}, ["b"])
    return made


def followed(forwards, *args, mode=Mode.TRAIN, training=None, **kwargs):
    return forwards.follow(flat_copy((args, kwargs)), mode, training)


def follow(forwards, *args, **options):
    return followed(forwards, *args, **options).program


def test_a_program_is_recorded_once_for_each_signature():
    forwards = forwards_of()
    assert follow(forwards, X + 1, SCALE) == 0
    assert forwards.definitions == {}  # the stages begin with that one
    longer = torch.ones(3, 4), torch.ones(3, 4)
    found = [
        follow(forwards, *longer),
        follow(forwards, X),
        follow(forwards, *longer),
        follow(forwards, X, SCALE, mode=Mode.INFER),
        follow(forwards, X, SCALE, mode=Mode.EVALUATE),
        follow(forwards, X, SCALE, training=False),
        follow(forwards, X, torch.full((4, 2), 2.0).t()),
        follow(forwards, X, SCALE),
    ]
    # An evaluation needs no program beside that of inference; other strides need one.
    assert found == [1, 2, 1, 3, 3, 4, 5, 0]
    made = [pickle.loads(each) for each in forwards.definitions.values()]
    assert [(number, len(parts)) for number, parts in made] == [(n, 2) for n in range(1, 6)]
    assert forwards.how == "cut by a recorded forward: 6 programs so far"


def test_inputs_go_to_the_stages_that_need_them():
    forwards = forwards_of()
    assert (forwards.entries, forwards.links) == ((0, 1), ((0, 1),))
    given = flat_copy(((X, SCALE), {}))
    shares = {
        stage: unflatten(structure, tensors)
        for stage, structure, tensors in forwards.shares(0, given)
    }
    assert shares.keys() == {0, 1}
    assert torch.equal(shares[0], X)
    assert torch.equal(shares[1], SCALE)
    # Without a scale, stage 1 gets nothing, but its turn comes all the same.
    number = follow(forwards, X)
    assert [
        (stage, unflatten(structure, tensors))
        for stage, structure, tensors in forwards.shares(number, flat_copy(((X,), {})))
    ][1] == (1, ())
    lines = forwards.program().splitlines()
    assert "stage 1 takes [1] from the coordinator" in lines
    assert lines[-1] == "    return 4"


def test_a_mini_batch_may_not_ask_for_what_no_stage_has():
    forwards = forwards_of()
    with pytest.raises(ConfigError, match="makes the model call c, which it did not call with the"):
        follow(forwards, X, SCALE, more=True)
    with pytest.raises(ConfigError, match="use unused on stage 1, which was sent only what the"):
        follow(forwards, X, SCALE, shift=True)
    assert len(forwards.cuts) == 1  # what was refused leaves no trace
    assert "c" not in forwards.homes
    assert follow(forwards, X) == 1


def test_the_program_that_was_followed_longest_ago_is_forgotten(monkeypatch):
    monkeypatch.setattr(recorded_forwards, "_MOST", 3)
    monkeypatch.setattr(recorded_forwards, "_FIRST", 100)
    forwards = forwards_of()
    sizes = [torch.ones(samples, 4) for samples in (3, 5, 7)]
    assert [follow(forwards, each) for each in sizes] == [1, 2, 3]
    assert forwards.unused() == []
    assert follow(forwards, sizes[0]) == 1
    assert follow(forwards, torch.ones(9, 4)) == 4
    assert forwards.unused() == [2]
    assert forwards.unused() == []
    more = [*sizes, torch.ones(9, 4)]
    assert [follow(forwards, each) for each in more] == [1, 5, 3, 4]  # 2 is recorded again
    assert forwards.unused() == []  # what was followed since the last time stays
    assert sorted(forwards.definitions) == [1, 2, 3, 4, 5]  # a recovery may still need 2
    forwards.drop(2)
    assert sorted(forwards.cuts) == [0, 1, 3, 4, 5]
    assert follow(forwards, X, SCALE) == 0  # that of the example stays


def test_of_programs_for_one_shape_the_others_stay_where_one_is_forgotten(monkeypatch):
    monkeypatch.setattr(recorded_forwards, "_MOST", 1)
    monkeypatch.setattr(recorded_forwards, "_FIRST", 100)
    whole, padded = torch.ones(2, dtype=torch.bool), torch.tensor([True, False])
    forwards = forwards_of(Masked(), Batch((X[:1], whole[:1]), {}, None))
    assert [follow(forwards, X, mask) for mask in (whole, padded)] == [1, 2]
    assert forwards.unused() == []
    assert follow(forwards, X, padded) == 2
    assert forwards.unused() == [1]
    assert [follow(forwards, X, mask) for mask in (padded, whole)] == [2, 3]


def test_after_the_first_few_sizes_one_program_serves_all():
    forwards = forwards_of()
    each = [followed(forwards, torch.ones(n, 4), torch.ones(n, 4)) for n in range(3, 9)]
    numbers = [(found.program, found.numbers) for found in each]
    # The fourth is that for any sizes; it is looked at again at the first and second that follow.
    assert numbers[:3] == [(1, ()), (2, ()), (3, ())]
    assert numbers[3:] == [(5, ()), (6, ()), (4, (8,))]
    # Sizes that are no symbols, and 1, which torch treats apart, have programs of their own.
    for other in (torch.ones(1, 4), torch.ones(9, 4, dtype=torch.float64)):
        assert followed(forwards, other).numbers == ()


class Masked(Net):
    def forward(self, x, mask):
        x = self.b(self.a(x))
        return x if mask.all() else x * mask[:, None]


def test_what_is_read_parts_the_programs_for_any_sizes_too(caplog):
    """As where the first mini-batches have no padding, and later ones do."""
    forwards = forwards_of(Masked(), Batch((X, torch.ones(2, dtype=torch.bool)), {}, None))

    def masked(samples, whole):
        mask = torch.ones(samples, dtype=torch.bool)
        mask[-1] = whole
        found = followed(forwards, torch.ones(samples, 4), mask)
        return found.program if found.numbers or not whole else -1

    whole = [masked(n, True) for n in range(3, 9)]
    padded = [masked(n, False) for n in range(3, 15)]
    assert not [each for each in caplog.records if each.levelname == "WARNING"]
    assert whole[-1] == masked(50, True)
    assert padded[-1] == masked(50, False)
    assert padded[-1] != whole[-1]
    for n in range(15, 24):  # in turn
        masked(n, True), masked(n, False)
    [kind] = forwards._kinds.values()
    assert len(kind.found) == 2


class AsksForTheClass(Net):
    def forward(self, x):
        size = x.shape[0]
        more = type(size) is int and size > 7  # a symbol's is another
        x = self.b(self.a(x))
        return x + 1 if more else x


def test_a_forward_that_takes_a_symbol_for_no_number_is_found_out(caplog):
    forwards = forwards_of(AsksForTheClass(), Batch((X,), {}, None))
    found = [follow(forwards, torch.ones(n, 4)) for n in range(3, 9)]
    assert "takes another way with inputs of shapes" not in caplog.text
    found += [follow(forwards, torch.ones(n, 4)) for n in range(9, 14)]
    assert "takes another way with inputs of shapes" in caplog.text
    assert len(set(found[-3:])) == 3
    # A micro-batch that follows the wrong one may not be fed yet.
    assert 4 in forwards.definitions
    assert forwards.unused() == []


def test_kinds_of_inputs_are_forgotten_too(monkeypatch):
    monkeypatch.setattr(recorded_forwards, "_MOST", 3)
    forwards = forwards_of()
    for count in range(9):  # a value that is no tensor makes another kind
        follow(forwards, X, float(count))
    assert len(forwards._kinds) == 3


class Own(Net):
    def forward(self, x, labels=None):
        x = super().forward(x)
        if labels is None:
            return {"logits": x}
        return {"loss": nn.functional.cross_entropy(x, labels), "logits": x}


def test_a_model_that_computes_its_loss_says_over_how_many_labels():
    labels = torch.tensor([1, -100])
    forwards = forwards_of(Own(), Batch((X, labels), {}, None), own_loss=True)
    found = followed(forwards, X, labels)
    assert (found.program, int(found.labels), found.only_labels) == (0, 1, True)
    assert int(followed(forwards, X, labels.abs() % 4).labels) == 2
    with pytest.raises(ConfigError, match="what it returns has none: give it the inputs"):
        follow(forwards, X)
    assert follow(forwards, X, mode=Mode.INFER) == 1


@pytest.fixture
def generating(monkeypatch):
    """What forwards a model of transformers by some tokens, and notes in which it recorded."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    sizes = {"vocab_size": 9, "n_positions": 32, "n_embd": 4, "n_layer": 2, "n_head": 1}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    model, cache = transformers.GPT2LMHeadModel(config).eval(), transformers.DynamicCache()
    forwards = RecordedForwards(model, find_layers(model))
    example = Batch((), {"input_ids": torch.zeros(1, 5, dtype=torch.int64)}, None)
    forwards.begin(example, {Mode.INFER: forwards.record(example, Mode.INFER)}, ["transformer.h.1"])
    record, recorded = forwards.record, []

    def noted(*args, **options):
        recorded.append(cache.get_seq_length())
        return record(*args, **options)

    def forward(length):
        place = cache.get_seq_length()
        positions = torch.arange(place, place + length)[None]
        named = {"input_ids": positions % 9, "position_ids": positions, "use_cache": True}
        inputs = flat_copy(forwards.inputs(Batch((), named, None)))
        number = forwards.cached(inputs, Cache("past_key_values", cache), length)
        assert cache.get_seq_length() == place + length
        return number

    monkeypatch.setattr(forwards, "record", noted)
    return forwards, forward, recorded


def test_a_cache_grows_by_each_forward_and_forwards_are_recorded_at_powers_of_two(generating):
    """A model of transformers whose program serves other lengths too, once it came twice."""
    _, forward, recorded = generating
    for length in (5, *[1] * 13):
        forward(length)
    assert recorded == [0, 5, 6, 8, 16]


def test_a_program_that_serves_all_lengths_of_a_cache_is_recorded_again_where_it_was_forgotten(
    generating, monkeypatch
):
    forwards, forward, recorded = generating
    monkeypatch.setattr(recorded_forwards, "_MOST", 0)
    first, serves = forward(5), [forward(1) for _ in range(5)]
    assert serves == [serves[0]] * 5  # with 10 in the cache it would not be recorded
    assert forwards.unused() == []
    assert forwards.unused() == [first, serves[0]]
    assert forward(1) not in serves
    assert recorded == [0, 5, 6, 8, 10]


@pytest.mark.parametrize(
    ("weights", "autocast", "dtype"),
    [
        (torch.float32, None, torch.float32),
        (torch.float64, None, torch.float32),
        (torch.bfloat16, None, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
    ],
    ids=str,
)
def test_the_coarsest_dtype_counts(weights, autocast, dtype):
    model = Net().to(weights)
    assert RecordedForwards(model, find_layers(model), autocast).dtype is dtype
