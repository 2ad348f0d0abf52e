"""Hooks of mkdocs (see mkdocs.yml): the same links work on GitHub and in the site.

Pages link to paths of the repository. Files outside docs/ that a page links to become part of the site: README.md,
CONTRIBUTING.md and CHANGELOG.md as pages of their own, everything else below repository/.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_PATH_OF = {address: path for path, address in _TOP.items()}
_PICTURES = (".svg", ".png")
_LANGUAGES = {".py": "python", ".c": "c", ".h": "c", ".cc": "cpp", ".json": "json"}
_NO_SEARCH = "---\nsearch:\n  exclude: true\n---\n"

_FENCED = re.compile(r"^(```.*?^```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?P<before>\]\()(?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of docs/, and every file of the repository that a page links to."""
    pending = [*_TOP, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(pending)
    for path in pending:
        if path in _TOP:
            files.append(File.generated(config, _TOP[path], content=(ROOT / path).read_text(encoding="utf-8")))
        for target in _links(path):
            if target in seen or not (ROOT / target).exists() or target.startswith("docs/"):
                continue
            seen.add(target)
            files.append(_repository_file(target, config))
            if target.endswith(".md"):
                pending.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links by paths of the repository into links by paths of the site."""
    address = page.file.src_uri
    path = _path(address)

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))
        relative = posixpath.relpath(_address(target), posixpath.dirname(address) or ".")
        return f"{match['before']}{relative}{match['anchor'] or ''}"

    return _outside_of_code(markdown, lambda text: _LINK.sub(moved, text))


def _links(path: str) -> Iterator[str]:
    """The paths in the repository that a page links to."""
    text = _FENCED.sub("", (ROOT / path).read_text(encoding="utf-8"))
    for match in _LINK.finditer(text):
        yield posixpath.normpath(posixpath.join(posixpath.dirname(path), match["path"]))


def _path(address: str) -> str:
    """The path in the repository of what the site has at an address."""
    if address.startswith("repository/"):
        return address.removeprefix("repository/")
    return _PATH_OF.get(address, f"docs/{address}")


def _address(path: str) -> str:
    """The address in the site of a path in the repository."""
    if path in _TOP:
        return _TOP[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith((".md", *_PICTURES)) else f"repository/{path}.md"


def _repository_file(path: str, config: MkDocsConfig) -> File:
    source = ROOT / path
    if path.endswith(_PICTURES):
        return File.generated(config, _address(path), abs_src_path=str(source))
    if source.is_dir():
        listed = "\n".join(f"- `{name}`" for name in sorted(os.listdir(source)) if name != "__pycache__")
        content = f"{_NO_SEARCH}# {path}\n\n{listed}\n"
    elif path.endswith(".md"):
        content = source.read_text(encoding="utf-8")
    else:
        language = _LANGUAGES.get(source.suffix, "text")
        content = f"{_NO_SEARCH}# {path}\n\n````{language}\n{source.read_text(encoding='utf-8')}\n````\n"
    return File.generated(config, _address(path), content=content)


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = _FENCED.split(markdown)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))
