"""Bring pages that live beside the docs into the site, and point links outside to the source.

Pages read the same in the repository and on the site: `../benchmarks/README.md` is part of the
site, and a link to `../src/...` or `../configs/...` becomes a path. `reference.md` is written from
the source.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import reference

ROOT = Path(__file__).parents[1]
BESIDE = ("benchmarks/README.md", "examples/README.md")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages and pictures that live beside the docs."""
    from mkdocs.structure.files import File

    pictures = sorted(
        path.relative_to(ROOT).as_posix()
        for ending in ("png", "svg")
        for path in ROOT.glob(f"benchmarks/results/**/*.{ending}")
    )
    for path in (*BESIDE, *pictures):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "reference.md", content=reference.page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links out of the docs folder to pages of `on_files`, or turn them into text."""
    depth = "../" if page.file.src_uri in BESIDE else ""

    def link(found: re.Match[str]) -> str:
        picture, text, target = found.groups()
        path, _, anchor = target.partition("#")
        inside = path.removeprefix("../")
        if path.startswith("../docs/"):
            inside = path.removeprefix("../docs/")
            return f"{picture}[{text}]({depth}{inside}{'#' + anchor if anchor else ''})"
        if files.get_file_from_path(inside) is not None:
            return f"{picture}[{text}]({depth}{inside}{'#' + anchor if anchor else ''})"
        return f"{text} (`{inside}`)" if inside not in text else text

    return re.sub(r"(!?)\[([^\]]+)\]\((\.\./[^)]+)\)", link, markdown)
