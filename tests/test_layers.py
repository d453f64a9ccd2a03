"""The shape of the package: who may import whom, and what is public."""

import ast
import configparser
import inspect
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from support.rooms import is_optional, layers, library_files

import pipedream_rt
from pipedream_rt import torch_private

ROOT = Path(__file__).resolve().parent.parent
LAYERS = layers()
FILES = library_files(ROOT)


LATE = {"pipedream_rt", "pipedream_rt.extras"}
"""The files whose names are imported when they are asked for."""


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module):
    """Of the longest name that a module has: three files of planning measure with a pipeline."""
    found = [
        (len(name), number)
        for number, names in enumerate(LAYERS)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    return max(found)[1] if found else None


@cache
def nodes_of(path):
    """All that stands in a file, which is read once."""
    return list(ast.walk(ast.parse(path.read_text())))


@cache
def imports_of(path):
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_imports_only_from_its_own_layer_and_those_above(path):
    own = layer_of(module_of(path))
    if module_of(path) in LATE:
        pytest.skip("its names come from everywhere, lazily")
    assert own is not None, "give the file a layer"
    for module in imports_of(path):
        if module.startswith("pipedream_rt"):
            layer = layer_of(module)
            assert layer is None or layer <= own, f"{module_of(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_of_the_core_imports_an_optional_room(path):
    """Not even late: `extras.py` alone does, by name."""
    if module_of(path) in LATE or is_optional(module_of(path)):
        pytest.skip("it is no file of the core")
    assert [module for module in imports_of(path) if is_optional(module)] == []


def imports_without_a_reason(path):
    """Imports inside functions that have no comment beside them, or above their block."""
    lines = path.read_text().splitlines()
    for function in nodes_of(path):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Import | ast.ImportFrom):
                first = node.lineno - 1
                while lines[first - 1].strip().startswith(("import ", "from ")):
                    first -= 1
                if "#" not in lines[node.lineno - 1] + lines[first] + lines[first - 1]:
                    yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_an_import_inside_a_function_has_its_reason_beside_it(path):
    assert list(imports_without_a_reason(path)) == []


def bound_at_top_level(path):
    """Each binding of a name in a module itself, neither in a branch nor of an overload."""
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                if not any("overload" in ast.unparse(each) for each in node.decorator_list):
                    yield node.name
            case ast.Import() | ast.ImportFrom():
                names = (each.asname or each.name for each in node.names)
                yield from (name for name in names if "." not in name)  # a.b and a.c bind one a
            case ast.Assign() | ast.AnnAssign(value=ast.expr()):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for each in (part for target in targets for part in ast.walk(target)):
                    if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                        yield each.id


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_module_binds_a_name_once(path):
    """A limit of 4 KiB was 1 MiB once, by another constant of its name below."""
    bound = Counter(bound_at_top_level(path))
    assert [name for name, times in bound.items() if times > 1] == []


def test_every_room_has_its_own_row():
    folders = {module_of(path.parent / "__init__.py") for path in FILES} - {"pipedream_rt"}
    assert folders <= set().union(*LAYERS)


def test_no_files_import_each_other_in_a_circle():
    """A layer may hold many files; among them too, arrows go one way."""
    modules = {module_of(path): path for path in FILES}
    arrows = {
        name: {m for m in imports_of(path) if m in modules and m != name}
        for name, path in modules.items()
        if name not in LATE
    }
    done = {*LATE}
    while ready := {name for name, needed in arrows.items() if needed <= done} - done:
        done |= ready
    assert not arrows.keys() - done, "these import each other in a circle"


def test_a_stage_does_no_io():
    """No clock, no disk, no thread, no transport: tensors in, tensors out."""
    forbidden = {"time", "os", "pathlib", "socket", "threading", "concurrent", "logging"}
    layers = ("transport", "cluster", "checkpoint", "messages.inbox", "messages.message")
    folder = ROOT / "pipedream_rt" / "stage"
    names = (
        "stage", "parameters", "weights", "optimizer", "split_backward", "in_flight", "runner",
        "inference", "buffers", "spec", "stage_state",
    )  # fmt: skip
    for path in [*(folder / f"{name}.py" for name in names), *(folder / "rules").glob("*.py")]:
        imported = imports_of(path)
        assert not forbidden & {module.split(".")[0] for module in imported}, path
        wrong = {m for m in imported for layer in layers if m.startswith(f"pipedream_rt.{layer}")}
        assert not wrong, path


def test_the_placement_of_stages_is_said_once():
    """Which worker hosts a stage is a matter of the plan, which asks the shape once."""
    users = {
        module_of(path)
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and "workers" in ast.unparse(node.right)
    }
    # The second is the rule for the number of micro-batches, of which there are groups of n.
    assert users == {"pipedream_rt.schedules.shape", "pipedream_rt.schedules.orders"}


@pytest.mark.parametrize("package", ["schedules", "tracing", "simulation"])
def test_what_needs_no_process_and_no_clock_is_pure(package):
    for path in (ROOT / "pipedream_rt" / package).glob("*.py"):
        forbidden = {"torch", "threading", "multiprocessing", "time", "socket"}
        assert not forbidden & {m.split(".")[0] for m in imports_of(path)}


def test_the_transport_alone_imports_torch_rpc():
    users = [module_of(p) for p in FILES if any("distributed.rpc" in m for m in imports_of(p))]
    assert sorted(users) == [
        "pipedream_rt.torch_private",
        "pipedream_rt.transport.rpc.endpoint", "pipedream_rt.transport.rpc.pickling",
    ]  # fmt: skip


def test_the_environment_is_read_at_the_face_alone():
    readers = {
        module_of(p)
        for p in FILES
        if any(
            isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            for node in nodes_of(p)
        )
    }
    # endpoint.py writes two variables, for torch alone understands them; the fork server and the
    # processes that it makes hand the whole environment on.
    assert readers == {
        "pipedream_rt",  # takes what `pipedream-rt run` has put there for one process
        "pipedream_rt.models.parcel",  # compares what the user's code reads of it
        "pipedream_rt.cli.doctor",
        "pipedream_rt.cli.profile",
        "pipedream_rt.cli.run",
        "pipedream_rt.cluster.engines.ray_nodes",
        "pipedream_rt.cluster.environment",
        "pipedream_rt.cluster.forked_workers",
        "pipedream_rt.cluster.elsewhere",
        "pipedream_rt.cluster.generations",
        "pipedream_rt.cluster.nodes",
        "pipedream_rt.cluster.torchrun",
        "pipedream_rt.coordinator.script_environment",
        "pipedream_rt.transport.rpc.endpoint",
        "pipedream_rt.cluster.worker.command",
        "pipedream_rt.cluster.worker.fork_server",
        "pipedream_rt.cluster.worker.joining",
    }


def test_every_logger_is_one_whose_handlers_may_fail():
    users = {
        module_of(path)
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    }
    # The second adds a handler of its own; the third silences a logger of torch.
    assert users == {
        "pipedream_rt.telling",
        "pipedream_rt.coordinator.views.event_publisher",
        "pipedream_rt.torch_private",
    }


def test_the_public_names_exist_and_have_docstrings():
    for name in pipedream_rt._HOMES:
        assert inspect.getdoc(getattr(pipedream_rt, name))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = pipedream_rt.Nothing


def test_ten_of_the_public_names_are_shown():
    assert len(pipedream_rt.__all__) == 10
    assert {*pipedream_rt.__all__} < {*pipedream_rt._HOMES}
    assert dir(pipedream_rt) == sorted([*pipedream_rt.__all__, "__version__"])


def test_every_error_of_the_tree_that_a_caller_meets_is_public():
    from pipedream_rt import errors

    defined = {
        n for n, c in inspect.getmembers(errors, inspect.isclass) if c.__module__ == errors.__name__
    }
    assert defined - set(pipedream_rt._HOMES) == {"RemoteError"}


def test_importing_the_package_imports_no_torch():
    """The command line and a waiting worker start at once."""
    import subprocess
    import sys

    code = (
        "import sys, pipedream_rt.cli, pipedream_rt.cluster.worker.command\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd="/").returncode == 0


def test_no_file_that_git_tracks_is_larger_than_300_kb():
    """Wheels, weights and traces do not belong in the history."""
    import shutil
    import subprocess

    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout, or there is no git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip(f"git cannot list the files: {listed.stderr.strip()}")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    sizes = {str(p.relative_to(ROOT)): p.stat().st_size for p in paths if p.is_file()}
    assert not {name: size for name, size in sizes.items() if size > 300_000}


def test_an_installed_package_has_every_folder():
    """An editable installation finds a folder that the list lacks; a wheel does not have it."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    named = setup["options"]["packages"].split()
    assert sorted(named) == sorted({module_of(path.parent / "__init__.py") for path in FILES})


OF_TORCHS_OBJECTS = {
    *torch_private.OF_MODULES, *torch_private.OF_TENSORS, "_cdata",
    # Of its own pickler and references (see `transport/rpc/pickling.py`), and of `torch.autocast`.
    "_dispatch_table", "_serialize", "_deserialize", "_enabled",
}  # fmt: skip
OF_OTHERS = {"_exit", "_getframe", "_fields"}
"""Names of Python that begin with an underscore and are documented."""


def private_names_of_others(path, own):
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (name for name in names if name.startswith("_"))


def own_names(path):
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_private_names_of_torch_stand_in_one_file():
    """There each is looked up once, and has what is done where a version of torch lacks it."""
    own = {name for path in FILES for name in own_names(path)} | OF_OTHERS
    found = {
        (module_of(path), name)
        for path in FILES
        for name in private_names_of_others(path, own | OF_TORCHS_OBJECTS)
        if not name.startswith("__")
        # Those of transformers and Ray are the extras', which pin what they need.
        and not module_of(path).startswith(("pipedream_rt.hf", "pipedream_rt.cluster.engines.ray"))
    }
    home = {("pipedream_rt.torch_private", name) for _, name in found}
    assert found <= home, sorted(found - home)


def test_the_cause_why_a_name_cannot_be_loaded_is_told(monkeypatch):
    monkeypatch.setitem(pipedream_rt._HOMES, "Shape", "pipedream_rt.errors")
    with pytest.raises(ImportError, match=r"pipedream_rt.Shape cannot be loaded: .*'Shape'"):
        from pipedream_rt import Shape  # noqa: F401
