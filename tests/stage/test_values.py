"""Messages of a micro-batch that carry values."""

from support.messages import head, message

from pipedream_rt.messages.head import Mode
from pipedream_rt.messages.message import Activation, Failed, Target
from pipedream_rt.stage.values import failed_of

HEAD = head(0, mode=Mode.EVALUATE)


def failed(address):
    return Failed(address=address, action="evaluate 0", type_name="KeyError", text="", trace="")


def test_of_several_inputs_that_have_failed_the_first_is_told():
    """In the order of the stages, whatever came first."""
    came = [
        message(Activation(head=HEAD, turns=[0], failed=each), to=3, sender=sender, number=0)
        for sender, each in enumerate((None, failed(1), failed(2)))
    ]
    target = message(Target(structure=["P", None]), to=3, sender=-1, number=0)
    assert failed_of([*came, target]) == failed(1)
    assert failed_of([came[0], target]) is None
