"""The group of all commands."""


def test_help_names_every_verb(call):
    output = call("--help")
    for verb in ("run", "worker", "schedule", "simulate", "status", "timeline", "checkpoint"):
        assert f"  {verb} " in output
