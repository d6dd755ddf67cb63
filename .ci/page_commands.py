"""Run every command of every page on CPU, as a reader types it.

    make check-docs                                              # all pages: about half an hour
    .venv/bin/python .ci/page_commands.py docs/quickstart.md     # some of them
    .venv/bin/python .ci/page_commands.py --list                 # run nothing, say what would run
    .venv/bin/python .ci/page_commands.py --write                # .ci/gpu_commands.md

The commands of a page run in the order of the page, in a copy of the repository's files with the
models that the quickstart makes. `cd` and `export` last until the end of their code block.
`page_commands.toml` says which commands run smaller, and which do not run here.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RULES: dict[str, Any] = tomllib.loads((Path(__file__).with_suffix(".toml")).read_text())
QUICKSTART = "docs/quickstart.md"
BLOCK = re.compile(r"^```(?:bash|sh)\n(.*?)^```", re.S | re.M)
LISTED = re.compile(r"(?<=<!-- commands: gpu -->\n).*(?=<!-- /commands -->)", re.S)
LIST_PAGE = Path(__file__).with_name("gpu_commands.md")
LIMIT_S = 1200
REASONS = {
    "gpu": "needs a GPU",
    "network": "needs a network",
    "framework": "needs the environment of another framework; `make check-frameworks`",
    "cluster": "needs several nodes, a scheduler or Docker",
    "setup": "sets up an environment, or the reader's shell",
    "long": "takes hours, or runs in the gate",
    "own": "needs a program of the reader",
    "same": "runs in the quickstart",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a page: where it stands, and what becomes of it here."""

    page: str
    block: int
    written: str
    """The command as the page has it, on one line and without its comment."""
    run: str
    """The command as it runs here; empty if it does not."""
    reason: str = ""
    """Key of `REASONS` if the command does not run."""


def pages() -> list[str]:
    """Return all pages with commands; the quickstart comes first."""
    beside = ["README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"]
    docs = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
    return [QUICKSTART, *beside, *(page for page in docs if page != QUICKSTART)]


def lines(text: str) -> list[list[str]]:
    """Return the commands of the code blocks of a page, block by block."""
    blocks = [re.sub(r"\\\n\s*", "", block) for block in BLOCK.findall(text)]
    return [
        [found for line in block.splitlines() if (found := re.sub(r"(^|\s)#.*", "", line).strip())]
        for block in blocks
    ]


def commands(page: str) -> list[Command]:
    """Return the commands of a page, as the rules have them."""
    return [
        decide(page, number, line)
        for number, block in enumerate(lines((ROOT / page).read_text()), 1)
        for line in block
    ]


def decide(page: str, block: int, line: str) -> Command:
    """Apply the first rule that fits."""
    for rule in RULES["rule"]:
        fits = rule.get("page", page) == page and rule.get("block", block) == block
        if fits and re.match(rule["command"], line):
            if "not_run" in rule:
                return Command(page, block, line, "", rule["not_run"])
            text = line
            for old, new in rule.get("swap", {}).items():
                text = text.replace(old, new)
            command, redirect, target = text.partition(" > ")
            return Command(
                page,
                block,
                line,
                f"{command} {rule['add']}{redirect}{target}" if "add" in rule else text,
            )
    return Command(page, block, line, line)


def table() -> str:
    """Return the commands that need a GPU as a table."""
    rows = ["| page | command |", "|---|---|"]
    for page in pages():
        for command in commands(page):
            if command.reason == "gpu":
                name = page.removeprefix("docs/")
                rows.append(f"| [{name}](../{page}) | `{command.written}` |")
    return "\n".join(["", *rows, ""]) + "\n"


class Scratch:
    """Folders in which commands run: one for each page."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "QUICKSTART": str(self.folder(QUICKSTART)),
            "HF_HUB_OFFLINE": "1",
        }

    def folder(self, page: str) -> Path:
        return self._root / page.replace("/", "-").removesuffix(".md")

    def prepare(self, page: str) -> None:
        """Copy the files of the repository, and make what a reader of the page has."""
        folder = self.folder(page)
        shutil.rmtree(folder, ignore_errors=True)
        listed = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\0")
        for name in filter(None, listed):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copyfile(ROOT / name, folder / name)
        (folder / ".venv").symlink_to(sys.prefix)
        if page != QUICKSTART:
            models = self.folder(QUICKSTART) / "models"
            for model in ("tiny", "tiny-sft"):
                shutil.copytree(models / model, folder / "models" / model)
        for line in RULES["prepare"].get(page, ()):
            done = self.run(line, folder, {})
            if done.returncode:
                sys.exit(f"{page}: preparing failed: {line}\n{done.stdout}")

    def run(
        self, line: str, cwd: Path, exported: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["timeout", str(LIMIT_S), "bash", "-c", line],
            cwd=cwd, env=self._environment | exported, text=True, check=False,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def try_page(self, page: str) -> list[str]:
        """Run the commands of a page, print a row for each, and return those that failed."""
        failed, block = [], 0
        place, exported = self.folder(page), dict[str, str]()
        found = commands(page)
        if not any(command.run for command in found):
            for command in found:
                say(f"not run: {REASONS[command.reason]}", command)
            return []
        self.prepare(page)
        for command in found:
            if command.block != block:
                block, place, exported = command.block, self.folder(page), {}
            if not command.run:
                say(f"not run: {REASONS[command.reason]}", command)
                continue
            verb, *words = shlex.split(command.run)
            if verb == "cd":
                place /= words[0]
                say("ok" if place.is_dir() else "FAILED", command)
                continue
            if verb == "export":
                exported |= dict(word.split("=", 1) for word in words)
                say("ok", command)
                continue
            started_s = time.monotonic()
            done = self.run(command.run, place, exported)
            state = "ok" if done.returncode == 0 else f"FAILED ({done.returncode})"
            say(f"{state}, {time.monotonic() - started_s:.0f} s", command)
            if done.returncode:
                failed.append(f"{page}: {command.run}")
                write("\n".join(done.stdout.splitlines()[-30:]))
        return failed


def write(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def say(outcome: str, command: Command) -> None:
    ran = f"   [{command.run}]" if command.run not in ("", command.written) else ""
    write(f"{command.page:24} {outcome:28} {command.written}{ran}")


def main() -> None:
    """Run the commands of the pages that were named, or of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pages", nargs="*", help="pages such as docs/quickstart.md")
    parser.add_argument("--list", action="store_true", help="run nothing, say what would run")
    parser.add_argument("--write", action="store_true", help="write gpu_commands.md")
    parser.add_argument("--keep", type=Path, help="folder to work in; a quickstart in it is reused")
    options = parser.parse_args()
    if options.write:
        LIST_PAGE.write_text(LISTED.sub(table().replace("\\", r"\\"), LIST_PAGE.read_text()))
        return
    chosen = options.pages or pages()
    if options.list:
        for page in chosen:
            for command in commands(page):
                say(REASONS.get(command.reason, "runs"), command)
        return
    chosen = [QUICKSTART, *(page for page in chosen if page != QUICKSTART)]
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Scratch((options.keep or Path(temporary)).absolute())
        if scratch.folder(QUICKSTART).exists():
            chosen.remove(QUICKSTART)
        failed = [line for page in chosen for line in scratch.try_page(page)]
    write("\n".join(["", f"{len(failed)} commands failed", *failed]))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
