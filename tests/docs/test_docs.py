"""What the documentation says is there, and what is there is documented. Imports no torch."""

import ast
import functools
import re
import sys
import textwrap
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner
from support.docstrings import tree
from support.rooms import library_files

from pipedream_rt.cli import main
from pipedream_rt.cluster.worker_life import WorkerEnd
from pipedream_rt.job.conflicts import as_markdown

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OF_ROOT = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")]
SOURCES = library_files(ROOT)


def name_of(path):
    return str(path.relative_to(ROOT))


each_page = pytest.mark.parametrize("path", [*OF_ROOT, *PAGES], ids=name_of)


def blocks(path, language):
    """The fenced blocks of a page in one language."""
    fence = rf"^ *```{language}\n(.*?)^ *```$"
    found = re.findall(fence, path.read_text(), re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def prose(path):
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchor(heading):
    """As Markdown's table of contents makes it."""
    words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
    return re.sub(r"[-\s]+", "-", words)


def rows(path):
    """The rows of all tables of a page, as lists of cells."""
    lines = [line for line in prose(path).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@each_page
def test_every_relative_link_leads_to_a_file_and_every_anchor_to_a_heading(path):
    pictures = re.findall(r'\bsrc(?:set)?="([^"]+)"', prose(path))
    for link in [*re.findall(r"\]\(([^)\s]+)\)", prose(path)), *pictures]:
        if re.match(r"[a-z]+:", link):
            continue
        file, _, fragment = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if fragment:
            headings = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert fragment in map(anchor, headings), link


@each_page
def test_every_block_of_python_compiles(path):
    for block in blocks(path, "python"):
        compile(block, name_of(path), "exec")


@each_page
def test_what_a_page_shows_is_what_the_commands_print(path):
    """Every block that begins with ``$ pipedream-rt`` and shows the end of its output."""
    for block in blocks(path, ""):
        for part in block.split("$ pipedream-rt ")[1:]:
            words, _, output = part.partition("\n")
            expected = output.strip().splitlines()
            result = CliRunner().invoke(main, words.split())
            assert result.exit_code == 0, result.output
            assert result.output.strip().splitlines()[-len(expected) :] == expected


def test_the_picture_of_the_timeline_page_is_made_by_the_commands_above_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs" / "images").mkdir(parents=True)
    page = (DOCS / "guide" / "timeline.md").read_text()
    lines = [line.split() for line in page.splitlines() if "zb.trace" in line]
    assert [line[:2] for line in lines] == [
        ["pipedream-rt", "simulate"],
        ["pipedream-rt", "timeline"],
    ]
    for line in lines:
        assert CliRunner().invoke(main, line[1:]).exit_code == 0
    picture = Path("docs", "images", "zero_bubble.svg")
    assert (tmp_path / picture).read_text() == (ROOT / picture).read_text()


def test_every_picture_is_made_by_make_images():
    made = (ROOT / "benchmarks" / "studies" / "pictures.py").read_text()
    assert "pictures.py" in (ROOT / "Makefile").read_text()
    found = {path.name for path in (DOCS / "images").iterdir()}
    found = {"run-{name}.svg" if name.startswith("run-") else name for name in found}
    assert [name for name in found if name not in made] == []


def test_the_picture_of_readme_is_half_as_high_as_a_report_and_tells_of_a_kill():
    for scheme in ("light", "dark"):
        drawing = (DOCS / "images" / f"run-{scheme}.svg").read_text()
        width, height = map(int, re.findall(r'<svg [^>]*?width="(\d+)" height="(\d+)"', drawing)[0])
        assert (width, height <= 1150) == (1000, True)
        assert 'class="mark recovered"' in drawing


class _Settings(yaml.SafeLoader):
    """mkdocs.yml may hold tags of its own, which say nothing about the pages."""


_Settings.add_multi_constructor("!", lambda loader, tag, node: None)


def test_every_page_is_in_the_navigation_once():
    def files(entry):
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [file for value in values for file in files(value)]

    listed = files(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=_Settings)["nav"])
    made = ["index.md", "contributing.md", "changelog.md", "security.md"]
    assert sorted(listed) == sorted([*(str(p.relative_to(DOCS)) for p in PAGES), *made])


@functools.cache
def nodes():
    """Every node of the package."""
    return [node for path in SOURCES for node in ast.walk(tree(path))]


def constants():
    """Every constant of a module of the package: name to value."""
    found = {}
    for node in (node for path in SOURCES for node in tree(path).body):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            targets = [t.id for t in node.targets if isinstance(t, ast.Name)]
            found.update(dict.fromkeys(targets, node.value.value))
    return found


def variables_read():
    """The environment variables that the code reads or sets, by the expressions that do it."""
    named = constants()

    def is_environ(node):
        return isinstance(node, ast.Attribute) and node.attr == "environ"

    def variable(node):
        return node.value if isinstance(node, ast.Constant) else named.get(getattr(node, "id", ""))

    found = set()
    for node in nodes():
        match node:
            case ast.Call(func=ast.Attribute(value=mapping), args=[key, *_]) if is_environ(mapping):
                found.add(variable(key))
            case ast.Subscript(value=mapping, slice=key) if is_environ(mapping):
                found.add(variable(key))
            case ast.Compare(left=key, comparators=[mapping]) if is_environ(mapping):
                found.add(variable(key))
            case ast.Constant(value=str(text)) if re.fullmatch(r"PIPEDREAM_RT_[A-Z_]+", text):
                found.add(text)
    return found - {None}


def strings():
    """Every string in the code."""
    values = {node.value for node in nodes() if isinstance(node, ast.Constant)}
    return {value for value in values if isinstance(value, str)}


def test_the_environment_variables_documented_are_those_in_the_code():
    cells = [row[0] for row in rows(DOCS / "reference" / "environment.md")]
    documented = {name for cell in cells for name in re.findall(r"`([A-Z][A-Z_]+)`", cell)}
    assert variables_read() <= documented
    assert documented <= strings()


def test_the_exit_codes_documented_are_those_in_the_code():
    cells = [row[0] for row in rows(DOCS / "reference" / "environment.md")]
    documented = {int(code) for cell in cells for code in re.findall(r"`(\d+)`", cell)}
    ours = {end.value for end in WorkerEnd if end < WorkerEnd.AGAIN}  # the others stay inside
    clicks = {0, 1, click.UsageError.exit_code}
    assert clicks <= ours
    signal = {128}
    assert documented == ours | clicks | signal


def public_names():
    """What can be imported from `pipedream_rt`; read, not imported."""
    for node in ast.parse((ROOT / "pipedream_rt" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and node.targets[0].id == "_HOMES":
            return set(ast.literal_eval(node.value))
    raise AssertionError("there is no _HOMES")


def test_the_public_names_are_those_of_the_reference():
    pages = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    found = set(re.findall(r"^::: pipedream_rt\.(\w+)$", pages, re.MULTILINE))
    assert found - {"errors"} == public_names()  # the docstring of errors.py has their tree


def test_every_public_name_is_in_the_list_by_task_or_in_the_tree_of_errors():
    tree = ast.get_docstring(ast.parse((ROOT / "pipedream_rt" / "errors.py").read_text()))
    text = (DOCS / "reference" / "index.md").read_text() + tree
    assert not [name for name in public_names() if not re.search(rf"\b{name}\b", text)]


def commands(group, words=()):
    """Every verb with its command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))
        else:
            yield (*words, name), command


def test_every_verb_and_every_option_is_on_the_page_of_the_command_line():
    from pipedream_rt.cluster.worker.command import main as worker

    page = (DOCS / "reference" / "command-line.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    for words, command in commands(main):
        section = sections[words[0]]
        assert f"pipedream-rt {' '.join(words)}" in section
        known = worker if words == ("worker",) else command
        for option in known.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert f"`{option.opts[0]}`" in section, (words, option.opts[0])


def test_every_file_that_the_reading_order_names_is_there():
    found = set()
    for row in rows(DOCS / "design" / "reading-order.md"):
        folder = "pipedream_rt"
        for name in re.findall(r"`([\w/]+\.py)`", " | ".join(row)):
            # A name without a folder is in the folder of the name before it.
            if "/" in name:
                folder = str(Path(name).parent)
            found.add(Path(folder) / Path(name).name)
    missing = [
        str(path)
        for path in sorted(found)
        if not any((root / path).exists() for root in (ROOT, ROOT / "pipedream_rt"))
    ]
    assert not missing


@pytest.mark.parametrize(
    "path",
    [ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *sorted((DOCS / "design").glob("*.md"))],
    ids=name_of,
)
def test_every_file_that_is_named_with_its_folder_is_there(path):
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)[`:]", path.read_text()))
    roots = (ROOT, ROOT / "pipedream_rt", ROOT / "tests")
    of_torch = {name for name in named if name.startswith(("optim/", "multiprocessing/"))}
    assert all(any((root / name).exists() for root in roots) for name in named - of_torch)


def test_the_way_of_a_micro_batch_is_ten_files_at_most():
    steps = [row for row in rows(DOCS / "design" / "reading-order.md") if row[0].isdigit()]
    assert [int(row[0]) for row in steps] == list(range(1, len(steps) + 1))
    assert len({row[1] for row in steps}) == len(steps) <= 10


def test_the_table_of_conflicts_is_that_of_the_code():
    page = (DOCS / "reference" / "conflicts.md").read_text()
    assert page == as_markdown(), "python -m pipedream_rt.job.conflicts prints it"


def test_the_map_is_drawn_from_the_code():
    drawing = blocks(DOCS / "design" / "index.md", "")[1]
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from house import drawn_map
    finally:
        sys.path.pop(0)
    assert drawing.startswith(drawn_map(ROOT)), "python benchmarks/house.py --map draws it"


def test_every_command_of_a_benchmark_exists():
    """Of figures in the docs: the script is there, or the suite has the name."""
    from benchmarks.__main__ import BENCHMARKS

    texts = [path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))]
    scripts = {
        name for text in texts for name in re.findall(r"python (benchmarks/[\w/]+\.py)", text)
    }
    names = {name for text in texts for name in re.findall(r"python -m benchmarks (\w+)", text)}
    assert len(scripts) > 10
    assert [name for name in scripts if not (ROOT / name).is_file()] == []
    assert names <= {*BENCHMARKS}


def test_a_study_of_a_commit_has_left_the_tree():
    """Its figure names the commit and no command, since there is none here."""
    pages = [path.read_text() for path in (ROOT / "SECURITY.md", *PAGES)]
    named = [
        name
        for text in pages
        for name in re.findall(r"`(\w+\.py)[^`]*`\s+of (?:the same )?commit", text)
    ]
    assert len(named) > 10
    assert [name for name in named if list((ROOT / "benchmarks").rglob(name))] == []


def test_the_files_whose_time_is_known_are_there():
    from support.durations import SECONDS

    assert [name for name in SECONDS if not (ROOT / name).is_file()] == []
