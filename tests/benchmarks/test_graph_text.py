import pytest

from benchmarks.studies.published.graph_text import parse
from pipedream_rt.errors import ConfigError

COSTS = (
    "forward_compute_time=2.000, backward_compute_time=3.000, activation_size=%s, "
    "parameter_size=8.0"
)


def node(number, what="Linear(a=1, b=2)", size="4.000"):
    return f"node{number} -- {what} -- {COSTS % size}"


def test_times_are_milliseconds_and_lists_of_sizes_are_added_up():
    profile = parse(f"{node(1, size='[8.0; 4.0]')} -- stage_id=3\n{node(2)}\n\tnode1 -- node2\n")
    first = profile.layers[0]
    assert (first.name, first.forward) == ("node1 Linear(a=1, b=2)", 0.002)
    assert first.backward_input == first.backward_weight == 0.0015
    assert (first.output_bytes, first.saved_bytes, first.parameter_bytes) == (12.0, 12.0, 8.0)
    assert profile.is_chain


def test_the_first_source_comes_first_and_then_smaller_numbers():
    text = [node(7), node(2), node(10), node(9)]
    edges = ["\tnode7 -- node10", "\tnode2 -- node9", "\tnode10 -- node9"]
    names = [layer.name.split()[0] for layer in parse("\n".join(text + edges)).layers]
    assert names == ["node7", "node2", "node10", "node9"]


def test_inputs_and_dangling_items_are_left_out():
    text = [node(1, "Input0"), node(2), node(3, "__getitem__(0)"), node(4, "__getitem__(1)")]
    edges = ["\tnode1 -- node2", "\tnode2 -- node3", "\tnode2 -- node4", "\tnode4 -- node5"]
    profile = parse("\n".join([*text, node(5), *edges]))
    assert [layer.name.split()[0] for layer in profile.layers] == ["node2", "node4", "node5"]
    assert profile.edges == ((0, 1), (1, 2))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no node"),
        ("node1", "line 1 is no new node"),
        (f"{node(1)}\n{node(1)}", "line 2 is no new node"),
        ("node1 -- Linear -- forward_compute_time=1", "line 1 must have numbers for"),
        (node(1).replace("2.000", "fast"), "line 1 must have numbers for"),
        (node(1).replace("2.000", "-2.000"), "forward of layer"),
        (node(1).replace("2.000", "nan"), "forward of layer"),
        (f"{node(1)}\n\tnode1", "line 2 is no edge"),
        (f"{node(1)}\n\tnode1 -- node2", "line 2 is no edge between two nodes"),
        (f"{node(1)}\n{node(2)}\n\tnode1 -- node2\n\tnode2 -- node1", "circle, in which node1"),
        (node(1, "Input"), "no layer is left"),
    ],
)
def test_what_makes_no_sense_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text)
