"""The files of profiles, which are JSON."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

from pipedream_rt.errors import ConfigError
from pipedream_rt.paths import given_path
from pipedream_rt.planning.profile import NUMBERS, LayerCosts, Profile
from pipedream_rt.schema import printable, read_file, seconds, shown, write_file

FORMAT = 1
"""The version of the JSON format."""

_LARGEST = 1 << 28
"""Bytes that a profile may have."""


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a JSON file, which people may edit: it has a line for each layer.

    Raises:
        ConfigError: The file cannot be written.
    """
    path = given_path(path, "the file of the profile")
    layers = [
        {k: v for k, v in asdict(layer).items() if k == "name" or v} for layer in profile.layers
    ]
    head: dict[str, Any] = {"pipedream-rt profile": FORMAT}
    if profile.micro_batch is not None:
        head["micro_batch"] = profile.micro_batch
    if profile.process_bytes:
        head["process_bytes"] = profile.process_bytes
    # Written piece by piece: `indent` would give each number a line of its own.
    lines = [json.dumps({**head, "facts": dict(profile.facts)})[:-1] + ', "layers": [']
    lines.append(",\n".join(f" {json.dumps({'forward': 0.0, **layer})}" for layer in layers))
    edges = ""
    if not profile.is_chain or profile.edge_bytes:
        edges = f', "edges": {json.dumps(profile.edges)}'
    if profile.edge_bytes:
        edges += f', "edge_bytes": {json.dumps(profile.edge_bytes)}'
    lines.append(f"]{edges}}}\n")
    try:
        write_file(path, "\n".join(lines).encode())
    except OSError as error:
        raise ConfigError(f"the profile cannot be written to {path}: {error.strerror}") from error


def load(path: str | os.PathLike[str]) -> Profile:
    """Return the profile in a file.

    Raises:
        ConfigError: The file cannot be read, or holds no profile.
    """
    path = given_path(path, "the file of the profile")
    try:
        text = read_file(path, _LARGEST).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or printable(str(error))
        raise ConfigError(f"the profile {path} cannot be read: {reason}") from error
    try:
        return _parse(text)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _parse(text: str) -> Profile:
    """Return the profile in a text."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"it is no JSON: {printable(str(error))}") from error
    if not isinstance(found, dict):
        raise ConfigError("it is no profile: it is no JSON object")
    # By type: JSON's true would equal 1.
    if type(found.get("pipedream-rt profile")) is not int or (
        found["pipedream-rt profile"] != FORMAT
    ):
        raise ConfigError(
            f"it is no profile of format {FORMAT}: its 'pipedream-rt profile' is "
            f"{shown(found.get('pipedream-rt profile'), 40)}"
        )
    layers, edges = found.get("layers"), found.get("edges")
    if not isinstance(layers, list) or not all(isinstance(each, dict) for each in layers):
        raise ConfigError("profile: 'layers' must be a list of objects")
    known = {"name", *NUMBERS}
    for each in layers:
        if unknown := each.keys() - known:
            raise ConfigError(
                f"profile: a layer has {shown(min(unknown), 40)}, none of "
                f"{', '.join(sorted(known))}"
            )
        if not isinstance(each.get("name"), str) or "forward" not in each:
            raise ConfigError("profile: every layer needs a 'name' and a 'forward'")
    pair = isinstance(edges, list) and all(
        isinstance(e, list) and len(e) == 2 and all(type(i) is int for i in e) for e in edges
    )
    if edges is not None and not pair:
        raise ConfigError("profile: 'edges' must be a list of pairs of indices")
    edge_bytes = found.get("edge_bytes", [])
    if not isinstance(edge_bytes, list) or not all(map(seconds, edge_bytes)):
        raise ConfigError("profile: 'edge_bytes' must be a list of numbers")
    micro_batch, facts = found.get("micro_batch"), found.get("facts", {})
    if micro_batch is not None and (type(micro_batch) is not int or micro_batch < 1):
        raise ConfigError(f"profile: 'micro_batch' is {shown(micro_batch, 40)}")
    process_bytes = found.get("process_bytes", 0.0)
    if not seconds(process_bytes):
        raise ConfigError(f"profile: 'process_bytes' is {shown(process_bytes, 40)}")
    if not isinstance(facts, dict) or not all(isinstance(v, str) for v in facts.values()):
        raise ConfigError("profile: 'facts' must be an object of texts")
    return Profile(
        layers=tuple(LayerCosts(**each) for each in layers),
        edges=None if edges is None else tuple((a, b) for a, b in edges),
        edge_bytes=tuple(edge_bytes),
        micro_batch=micro_batch,
        process_bytes=process_bytes,
        facts=facts,
    )
