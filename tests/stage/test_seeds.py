import torch
from support.oracle import layer_seed as oracle_seed

from pipedream_rt.devices.randomness import kept_generator_state
from pipedream_rt.stage.runner import layer_seed


def test_the_seed_is_what_the_docstring_says():
    for arguments in ((0, 0, "0"), (5, 123, "block.7"), (-3, "infer 4", "x")):
        assert layer_seed(*arguments) == oracle_seed(*arguments)


def test_every_part_of_the_key_matters():
    seeds = {layer_seed(s, m, name) for s in range(3) for m in range(3) for name in "abc"}
    assert len(seeds) == 27


def test_the_generator_is_left_as_it_was():
    torch.manual_seed(1)
    expected = torch.rand(2).tolist()
    torch.manual_seed(1)
    with kept_generator_state():
        torch.manual_seed(99)
        torch.rand(7)
    assert torch.rand(2).tolist() == expected
