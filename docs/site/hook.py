"""MkDocs builds a site from pages that are written to be read in the repository, by way of this hook.

Pages link to what stands beside them: to other pages, to the README, to files of `deploy/`, to folders. Each such
target becomes a page of the site: a page of Markdown as it is, a file as a listing, a folder as a list. So links stay
as they are written, and `--strict` still finds each that leads nowhere. The navigation is what `docs/index.md` links,
under its headings, which makes that page complete: a page that it does not link is an error too. The site loads nothing
from elsewhere, and the build fails where it would.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from posixpath import dirname, normpath, relpath
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[2]
VENDOR: Final = ROOT / ".venv-docs" / "vendor"
INDEX: Final = "docs/index.md"
# Folders of which every page stands in the navigation.
WHOLE: Final = ("docs/design", "docs/adr")
_LINK: Final = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_COMMENT: Final = re.compile(r"<!--.*?-->")
_FENCE: Final = re.compile(r"^\s*(`{3,})")
_PICTURES: Final = (".svg", ".png", ".webp")
_LANGUAGES: Final = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".sh": "sh", ".json": "json"}
# What a browser would fetch by itself; a link that is followed by a click may lead anywhere.
_FETCHED: Final = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc="?(?:https?:)?//"""
    r"""|<link\b(?=[^>]*rel="?(?:stylesheet|preconnect|preload))[^>]*href="?(?:https?:)?//"""
    r"""|url\(['"]?(?:https?:)?//"""
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the navigation from the headings and links of the index."""
    sections: dict[str, list[str]] = {"": [INDEX]}
    under = ""
    for line in _prose(_read(INDEX)):
        if line.startswith("## "):
            under = line.removeprefix("## ").strip()
        for found in _LINK.finditer(line):
            for path in _expanded(_target(INDEX, found[2])):
                if not any(path in paths for paths in sections.values()):
                    sections.setdefault(under, []).append(path)
    top: list[Any] = [_place(path) for path in sections.pop("")]
    config.nav = top + [{name: [_place(path) for path in paths]} for name, paths in sections.items()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what pages link and MkDocs would not find, and the scripts that are fetched when the environment is made."""
    for script in VENDOR.glob("*.js"):
        files.append(File.generated(config, f"assets/vendor/{script.name}", abs_src_path=str(script)))
    left = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(left)
    while left:
        page = left.pop()
        for line in _prose(_read(page)):
            for found in _LINK.finditer(line):
                path = _target(page, found[2])
                if path in seen or not (ROOT / path).exists() or ":" in found[2]:
                    continue
                seen.add(path)
                if files.get_file_from_path(_place(path)) is None:
                    files.append(_added(path, config))
                if path.endswith(".md"):
                    left.append(path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets stand in the site; drop the comments by which figures are written."""
    here = page.file.src_uri
    source = _ORIGINS.get(here, f"docs/{here}")

    def led(found: re.Match[str]) -> str:
        path = _target(source, found[2])
        if ":" in found[2] or not (ROOT / path).exists():
            return found[0]  # MkDocs says what is wrong with it
        return f"{found[1]}{relpath(_place(path), dirname(here) or '.')}{found[3]}"

    return _outside_of_blocks(markdown, lambda line: _LINK.sub(led, _COMMENT.sub("", line)))


def on_post_build(config: MkDocsConfig) -> None:
    """Hold the site to what it promises: nothing is loaded from elsewhere."""
    site = Path(config.site_dir)
    for path in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        if found := _FETCHED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path.relative_to(site)} would load from elsewhere: {found[0]}")


# Where in the repository an added page comes from, by its place in the site.
_ORIGINS: Final[dict[str, str]] = {}


def _added(path: str, config: MkDocsConfig) -> File:
    """A file or folder of the repository as a file of the site."""
    place, real = _place(path), ROOT / path
    if path.endswith(_PICTURES):
        return File.generated(config, place, abs_src_path=str(real))
    _ORIGINS[place] = path
    if path.endswith(".md"):
        return File.generated(config, place, content=_read(path))
    if real.is_dir():
        within = sorted(one.name for one in real.iterdir() if one.is_file() and not one.name.startswith("."))
        listed = "\n".join(f"- `{name}`" for name in within)
        if path in WHOLE:
            listed = "\n".join(f"- [{_title(f'{path}/{name}')}]({name})" for name in within)
        _ORIGINS[place] = f"{path}/index.md"
        return File.generated(config, place, content=f"# {real.name.capitalize()}\n\n`{path}/` holds\n\n{listed}\n")
    listing = f"``````{_LANGUAGES.get(real.suffix, '')}\n{_read(path)}\n``````"
    return File.generated(config, place, content=f"# {real.name}\n\n`{path}`\n\n{listing}\n")


def _place(path: str) -> str:
    """The place in the site of a file or folder of the repository."""
    if (ROOT / path).is_dir():
        if (ROOT / path / "README.md").exists():
            return _place(f"{path}/README.md")
        return f"{path.removeprefix('docs/')}/index.md" if path in WHOLE else f"repository/{path}/index.md"
    if path.startswith("docs/") and path.endswith((".md", *_PICTURES)):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith((".md", *_PICTURES)) else f"repository/{path}.md"


def _expanded(path: str) -> list[str]:
    if path not in WHOLE:
        return [path]
    pages = sorted(str(one.relative_to(ROOT)) for one in (ROOT / path).glob("*.md") if one.name != "README.md")
    return [path, *pages]


def _target(page: str, link: str) -> str:
    return normpath(f"{dirname(page)}/{link}" if dirname(page) else link)


def _title(path: str) -> str:
    return next((line[2:].strip() for line in _read(path).splitlines() if line.startswith("# ")), Path(path).name)


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _prose(text: str) -> Iterator[str]:
    """The lines outside of code blocks."""
    lines: list[str] = []
    _outside_of_blocks(text, lambda line: (lines.append(line), line)[1])
    yield from lines


def _outside_of_blocks(text: str, change: Callable[[str], str]) -> str:
    lines = []
    fence = ""
    for line in text.split("\n"):
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1] == fence:
            fence = ""
        lines.append(line if found or fence else change(line))
    return "\n".join(lines)
