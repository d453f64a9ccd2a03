"""What mkdocs does for this site beside its own work.

- README.md and its neighbours in the root are pages too, without a copy in docs/. Links between
  them and docs/ are written as they are right in the repository, and changed for the site here.
- Every page is also there as plain Markdown, beside its HTML: ``guide/surviving.md`` beside
  ``guide/surviving/``. In the reference, docstrings stand in the place of the directives.
- ``llms.txt`` lists these files for programs that read the documentation.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES_OF_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"(?:(?<=\]\()|(?<=\bsrc=\")|(?<=\bsrcset=\"))([^)\"#\s:]+)")
_DIRECTIVE = re.compile(r"^::: (\S+)\n(?:    .*\n)*", re.MULTILINE)

_navigation: list[Navigation] = []
_plain: dict[str, str] = {}
_package: list[griffe.Object | griffe.Alias] = []


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose files are in the root."""
    for name, page in PAGES_OF_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Remember the navigation for `llms.txt`."""
    _navigation[:] = [nav]
    return nav


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links between docs/ and the root into links of the site."""
    at = next(
        (name for name, there in PAGES_OF_ROOT.items() if there == page.file.src_uri),
        f"docs/{page.file.src_uri}",
    )

    def changed(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(at), match[1]))
        target = PAGES_OF_ROOT.get(target, target.removeprefix("docs/"))
        return posixpath.relpath(target, posixpath.dirname(page.file.src_uri) or ".")

    in_code = False
    lines = []
    for line in markdown.split("\n"):
        in_code ^= line.lstrip().startswith("```")
        lines.append(line if in_code else _LINK.sub(changed, line))
    # Files that are no pages, as the examples, are named but not linked.
    text = re.sub(r"\[(`[^`\]]+`)\]\([./]*examples/[^)]*\)", r"\1", "\n".join(lines))
    _plain[page.file.src_uri] = text
    return text


def on_post_build(config: MkDocsConfig) -> None:
    """Write the plain Markdown of every page, and `llms.txt`."""
    site = Path(config.site_dir)
    for uri, text in _plain.items():
        file = site / uri
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(_DIRECTIVE.sub(lambda match: _described(match[1]), text))
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    lines += _listed(_navigation[0].items)
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def _listed(items: list[Any]) -> list[str]:
    """Lines for some entries of the navigation: pages as links, sections with their pages."""
    lines: list[str] = []
    for item in items:
        if isinstance(item, Page):
            title = item.title or item.file.src_uri
            lines += [f"- [{title}]({item.file.src_uri})"]
        else:
            lines += ["", f"## {item.title}", "", *_listed(item.children)]
    return lines


def _described(name: str) -> str:
    """The docstring of a name, and of its public members, as Markdown."""
    if not _package:
        _package.append(griffe.load("pipedream_rt", search_paths=[str(ROOT)]))
    found = _package[0][name.removeprefix("pipedream_rt.")]
    members = [m for m in found.members.values() if found.is_class and m.docstring is not None]
    return "\n".join(
        [
            f"## {name}\n\n{_text(found)}",
            *(
                f"### {found.name}.{member.name}\n\n{_text(member)}"
                for member in members
                if not member.name.startswith("_")
            ),
        ]
    )


def _text(found: griffe.Object | griffe.Alias) -> str:
    """Signature and docstring."""
    text = found.docstring.value if found.docstring else ""
    if found.is_function:
        text = f"`{found.signature()}`\n\n{text}"
    return f"{text}\n"
