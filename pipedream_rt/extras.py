"""The optional rooms that the core can open, by the name of what it needs of each.

No file of the core imports an optional room (`tests/support/rooms.py` lists both). Where a run asks
for one, the core takes the name from here, and the room is imported then: a run that asks for none
loads none. A new room takes a line in both halves of this file, or a base class of the core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Under their own names again, so that type checkers know them.
    from pipedream_rt.cluster.engines import why_nodes as why_nodes
    from pipedream_rt.cluster.engines.ray import RayWorkers as RayWorkers
    from pipedream_rt.coordinator.references.stage_reference import StageReference as StageReference
    from pipedream_rt.coordinator.text_generation import generate as generate
    from pipedream_rt.coordinator.views.event_publisher import EventPublisher as EventPublisher
    from pipedream_rt.coordinator.views.event_publisher import publisher_of as publisher_of
    from pipedream_rt.corrections.advice import advised as advised
    from pipedream_rt.notebook import calm_call as calm_call
    from pipedream_rt.notebook import calmly as calmly
    from pipedream_rt.notebook import close_earlier as close_earlier
    from pipedream_rt.notebook import remember as remember
    from pipedream_rt.observers.page.cells import explanation_html as explanation_html
    from pipedream_rt.observers.page.render import write_report as write_report
    from pipedream_rt.observers.progress import Barred as Barred
    from pipedream_rt.observers.progress import count_of as count_of
    from pipedream_rt.observers.progress import loss_words as loss_words
    from pipedream_rt.observers.progress import with_bar as with_bar
    from pipedream_rt.planning.choosing import with_stages_chosen as with_stages_chosen
    from pipedream_rt.planning.profiling import profile_and_end as profile_and_end
    from pipedream_rt.transport.rpc.endpoint import RPCEndpoint as RPCEndpoint
    from pipedream_rt.verify.compare import Verification as Verification
    from pipedream_rt.verify.run import Watching as Watching
    from pipedream_rt.verify.run import explained as explained
    from pipedream_rt.verify.run import verified as verified
    from pipedream_rt.verify.run import watching as watching

_HOMES = {
    "Barred": "pipedream_rt.observers.progress",
    "EventPublisher": "pipedream_rt.coordinator.views.event_publisher",
    "RPCEndpoint": "pipedream_rt.transport.rpc.endpoint",
    "RayWorkers": "pipedream_rt.cluster.engines.ray",
    "StageReference": "pipedream_rt.coordinator.references.stage_reference",
    "Verification": "pipedream_rt.verify.compare",
    "Watching": "pipedream_rt.verify.run",
    "advised": "pipedream_rt.corrections.advice",
    "calm_call": "pipedream_rt.notebook",
    "calmly": "pipedream_rt.notebook",
    "close_earlier": "pipedream_rt.notebook",
    "count_of": "pipedream_rt.observers.progress",
    "explained": "pipedream_rt.verify.run",
    "explanation_html": "pipedream_rt.observers.page.cells",
    "generate": "pipedream_rt.coordinator.text_generation",
    "loss_words": "pipedream_rt.observers.progress",
    "profile_and_end": "pipedream_rt.planning.profiling",
    "publisher_of": "pipedream_rt.coordinator.views.event_publisher",
    "remember": "pipedream_rt.notebook",
    "verified": "pipedream_rt.verify.run",
    "watching": "pipedream_rt.verify.run",
    "why_nodes": "pipedream_rt.cluster.engines",
    "with_bar": "pipedream_rt.observers.progress",
    "with_stages_chosen": "pipedream_rt.planning.choosing",
    "write_report": "pipedream_rt.observers.page.render",
}


def __getattr__(name: str) -> object:
    """Import the room of a name."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(_HOMES[name]), name)
    return found
