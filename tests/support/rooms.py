"""The rooms of the library, in the order in which they may import each other.

`tests/test_layers.py` holds the code to it, and `python benchmarks/house.py --map` draws it.
"""

ROOMS = (
    (("errors.py", ""), ("deadline.py", ""), ("lifecycle.py", ""), ("schema.py", ""),
     ("paths.py", ""), ("software.py", ""), ("telling.py", ""), ("containers.py", ""),
     ("packing.py", ""), ("extras.py", "")),
    (("schedules", "integers only"),),
    (("tracing", "recorded runs"),),
    (("observe.py", ""),),
    (("simulation", "without workers"),),
    (("observers", "who looks on"), ("observers/page", "in a browser")),
    (("planning", "which layers where"),),
    (("notebook.py", ""),),
    (("torch_private.py", ""),),
    (("messages", "what travels"),),
    (("models", "a model to stages"), ("checkpoint", "checkpoints on disk")),
    (("dynamo.py", ""),),
    (("devices", "what it runs on"),),
    (("stage", "one stage"), ("stage/rules", "what features do"), ("codecs", "fewer bytes")),
    (("transport", "to the next inbox"), ("transport/rpc", "references")),
    (("batches", "items, cut and fed"),),
    (("job", "before anything runs"),),
    (("corrections", "stale gradients"), ("optimizers", "that bear them")),
    (("planning/profiling.py", ""), ("planning/meter.py", "")),
    (("planning/auto_split.py", ""),),
    (("cluster", "where stages run"), ("cluster/engines", "who places them"),
     ("cluster/worker", "a worker process"), ("serial", "in one thread")),
    (("coordinator/results.py", ""), ("coordinator/distributed_optimizer.py", ""),
     ("coordinator/script_environment.py", "")),
    (("coordinator/recovery", "after a failure"),),
    (("coordinator/checkpointing", "while a run goes on"),),
    (("coordinator/feed", "into the pipe"),),
    (("coordinator/parameters.py", ""),),
    (("coordinator/references", "to what is there"),),
    (("coordinator/views", "what a run shows"),),
    (("coordinator", "the run"),),
    (("planning/choosing.py", ""),),
    (("verify", "beside plain torch"),),
    (("pipeline.py", "the face"),),
    (("planning/link_costs.py", ""), ("doctor", "is the network fit"), ("hf", "the Trainer")),
    (("cli", "the command"), ("__main__.py", "")),
    (("workers", "python -m"),),
)  # fmt: skip
"""Rows of (folder or file, what it is for): a file imports from its own row and rows above it.

A file with a row of its own, and no words, stands in the drawing with its folder.
"""


OPTIONAL = (
    "observers", "planning", "simulation", "verify", "doctor", "coordinator/references",
    "transport/rpc", "coordinator/text_generation.py", "codecs", "corrections", "optimizers",
    "cluster/engines", "notebook.py", "hf", "cli", "coordinator/views/event_publisher.py",
    "observe.py", "__main__.py",
)  # fmt: skip
"""Ring 1: what no file of the core, ring 0, imports. `extras.py` says what is loaded late."""


def library_files(root):
    """Return the files of the library in a checkout."""
    return sorted((root / "pipedream_rt").rglob("*.py"))


def layers():
    """Return the rows as sets of module names."""
    return [
        {f"pipedream_rt.{name.removesuffix('.py').replace('/', '.')}" for name, _ in row}
        for row in ROOMS
    ]


def is_optional(module):
    """Whether a module is of ring 1."""
    names = (f"pipedream_rt.{each.removesuffix('.py').replace('/', '.')}" for each in OPTIONAL)
    return any(module == name or module.startswith(f"{name}.") for name in names)
