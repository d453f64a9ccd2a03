"""Addresses, edges and needs: what they are called, and which message a rule asks for."""

from pipedream_rt.schedules import COORDINATOR, EdgeKind
from pipedream_rt.schedules.edges import Edge, EdgeRule, Need, name_of


def test_addresses_and_edges_have_names_for_people():
    assert name_of(COORDINATOR) == "the coordinator"
    assert name_of(2) == "stage 2"
    assert str(Edge(EdgeKind.GRADIENT, 2, 1)) == "gradient from stage 2 to stage 1"
    assert str(Edge(EdgeKind.LOSS, 2, COORDINATOR)) == "loss from stage 2 to the coordinator"


def test_a_need_is_told_with_the_names_of_a_plan():
    need = Need(Edge(EdgeKind.SHARE, 1, 0), 7)
    assert need.words() == "share 7 from stage 1"
    assert need.words(lambda address: f"replica {address}") == "share 7 from replica 1"


def test_a_rule_asks_for_the_message_of_its_action_or_the_one_that_it_computes():
    edge = Edge(EdgeKind.WEIGHT, 0, 1)
    assert EdgeRule(edge).of(3) == Need(edge, 3, peek=False)
    assert EdgeRule(edge, lambda index: index // 2, peek=True).of(5) == Need(edge, 2, peek=True)


def test_messages_of_two_kinds_do_not_share_an_edge():
    """Edges are keys, and kinds are hashed by identity."""
    edges = {Edge(kind, 0, 1) for kind in EdgeKind for _ in range(2)}
    assert len(edges) == len(EdgeKind)
    assert Edge(EdgeKind("loss"), 0, 1) in edges
    assert Edge(EdgeKind.LOSS, 1, 0) not in edges
