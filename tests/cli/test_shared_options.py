"""Options that several commands share."""

import ast
import re

import click
import pytest
from click.testing import CliRunner

from pipedream_rt.cli import main
from pipedream_rt.cli.plan import plan
from pipedream_rt.cli.run import run
from pipedream_rt.cli.shared_options import (
    GivenPath,
    Grouped,
    options_of_nodes,
    refuse_too_many,
    replicas_option,
    slack_option,
)
from pipedream_rt.errors import ConfigError
from pipedream_rt.schedules import plan_for


@pytest.mark.parametrize("command", [run, plan])
def test_options_stand_in_groups_in_the_help(call, command):
    grouped = " ".join(command._groups.values()).split()
    options = {each.name for each in command.params if isinstance(each, click.Option)}
    hidden = {"rdzv_backend", "rdzv_id", "rdzv_conf"}
    assert sorted(grouped) == sorted(options - hidden)
    shown = call(command.name, "--help")
    assert [f"{heading}:" in shown for heading in command._groups] == [True] * len(command._groups)
    other = shown.partition("Other options:")[2].split()
    assert other[:2] == ["-h,", "--help"]


def parameters_of(command):
    for each in getattr(command, "commands", {}).values():
        yield from parameters_of(each)
    yield from ((command.name, each) for each in command.params)


def test_every_path_of_every_command_is_one_as_people_give_it():
    paths = [
        (name, each) for name, each in parameters_of(main) if isinstance(each.type, click.Path)
    ]
    assert len(paths) > 15
    assert [(n, each.name) for n, each in paths if not isinstance(each.type, GivenPath)] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "--record", "s3://bucket/run", "train.py"],
        ["run", "--log-dir", "s3://bucket/run", "train.py"],
        ["checkpoint", "verify", "s3://bucket/run"],
        ["report", "s3://bucket/run"],
        ["report", "run", "-o", "s3://bucket/run"],
        ["plan", "s3://bucket/run"],
        ["timeline", "s3://bucket/run"],
        ["doctor", "--folder", "s3://bucket/run"],
        ["watch", "s3:/bucket/run"],
    ],
    ids=" ".join,
)
def test_an_address_is_no_path(call, arguments):
    output = call(*arguments, code=1)
    assert re.search(r"Error: .* is 's3:/+bucket/run', an address, where a path", output)


def test_a_path_begins_at_home(call, tmp_path, monkeypatch):
    """No shell expands it in --option=~/file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    said = call("plan", "~/model.profile", code=1)
    assert f"the profile {tmp_path}/model.profile cannot be read" in said


@click.command()
@replicas_option
@slack_option
@options_of_nodes
def shown(asked, replicas, slack):
    """Show what was read."""
    click.echo(repr((replicas, slack, asked.nodes, asked.rank, asked.endpoint)))


def read(*words):
    """What a command is given for some words."""
    done = CliRunner().invoke(shown, words)
    if done.exception is not None:
        raise done.exception
    return ast.literal_eval(done.output)


@pytest.mark.parametrize(
    ("words", "replicas", "slack"),
    [
        ([], (), None),
        (["--replicas", "2", "--slack", "1"], 2, 1),
        (["--replicas", "2, 1 ,3", "--slack", "0, 1"], (2, 1, 3), (0, 1)),
    ],
    ids=["none", "one for all", "one for each"],
)
def test_a_number_is_for_all_and_several_are_for_each(words, replicas, slack):
    assert read(*words)[:2] == (replicas, slack)


@pytest.mark.parametrize("text", ["", "2,", "two", "-1", "1.5", "²", "2;1", "\x1b[2J"], ids=ascii)
@pytest.mark.parametrize("option", ["replicas", "slack"])
def test_what_is_no_number_is_refused(option, text):
    with pytest.raises(ConfigError, match=f"{option} must be integers of at least") as found:
        read(f"--{option}={text}")
    assert str(found.value).isprintable()


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], (None, None, "")),
        (["--nnodes", "2", "--node_rank", "1", "--rdzv_endpoint", "a:1"], (2, 1, "a:1")),
        (["--master-addr", "b"], (None, None, "b:29500")),
        (["--master_addr", "::1", "--master_port", "7"], (None, None, "[::1]:7")),
        (["--master-port", "7"], (None, None, "")),
        (["--rdzv-endpoint", "a:1", "--master-addr", "b"], (None, None, "a:1")),
        (["--rdzv-backend", "c10d", "--rdzv_id", "x", "--rdzv-conf", "y"], (None, None, "")),
    ],
    ids=["nothing", "endpoint", "master", "IPv6", "port alone", "both", "of torchrun"],
)
def test_a_node_is_told_of_the_others_as_torchrun_is(words, asked):
    assert read(*words)[2:] == asked


def test_more_actions_than_can_be_shown_are_refused_with_their_number():
    plan = plan_for("1f1b", num_stages=4, per_update=8)
    refuse_too_many(plan, 10, 640, "a drawing")
    with pytest.raises(
        ConfigError, match=r"a drawing of 4 stages, 8 .* and 10 updates has 640 act"
    ):
        refuse_too_many(plan, 10, 639, "a drawing")


def test_an_option_that_stands_in_no_group_comes_last():
    command = Grouped(
        "x", params=[click.Option(["--b"]), click.Option(["--a"]), click.Option(["--c"])],
        groups={"First": "c missing", "Second": "a"},
    )  # fmt: skip
    text = CliRunner().invoke(command, ["--help"]).output
    places = [
        text.index(word) for word in ("First:", "--c", "Second:", "--a", "Other options:", "--b")
    ]
    assert places == sorted(places)
