"""Seeded damage to files and values: what disks, editors and typing errors make of them."""

from __future__ import annotations

import json
import math
import random
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import BaseModel

DEEP = 5000
"""Nested brackets that exceed the recursion limit of any parser here."""
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 3, 2.5, -0.5, 10**6, 10**18, -(10**18), 10**400),
    *(1e-300, 1e15, 1e308, -1e308, math.inf, -math.inf, math.nan),
    *("", "x", "0", "inf", "nan", "off", "[/]", "../..", "a\0b", "\ud800", "é", "n" * 5000),
    *([], {}, [[]], [None], [1, "x"], {"x": 1}, [["off", 0]], {"kind": "fixed"}),
)
"""Values that do not belong where they are put."""


def strange(draw: random.Random) -> Any:
    return draw.choice(STRANGE)


def harm_bytes(draw: random.Random, content: bytes) -> bytes:
    """Return what is left of a file after an accident."""
    cut = draw.randrange(len(content) + 1)
    flipped = bytearray(content or b"\0")
    for _ in range(draw.choice((1, 8, 64))):
        flipped[draw.randrange(len(flipped))] ^= 1 << draw.randrange(8)
    return draw.choice(
        (
            b"",
            b"\0" * min(len(content), 4096),
            content[:cut],
            content[cut:],
            content[:cut] + b"\xff\xfe" + content[cut:],
            content + content[:cut],
            content.replace(b"\n", b"\r\n"),
            draw.randbytes(200),
            b"[" * DEEP,
            b'{"a":' * DEEP,
            b"null\n",
            b"[]\n",
            b"3\n",
            b'"text"\n',
            bytes(flipped),
        )
    )


def harm_tree(draw: random.Random, tree: Any) -> Any:
    """Replace, remove or add one value somewhere in a tree of dicts and lists."""
    if not isinstance(tree, dict | list) or not tree:
        return strange(draw)
    place: Any = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
    action = draw.random()
    if action < 0.15:
        del tree[place]
    elif action < 0.2 and isinstance(tree, dict):
        tree["surprise"] = strange(draw)
    elif action < 0.5 or not isinstance(tree[place], dict | list):
        tree[place] = strange(draw)
    else:
        tree[place] = harm_tree(draw, tree[place])
    return tree


def harm_json(draw: random.Random, content: bytes) -> bytes:
    """Damage one value of a JSON file, or of one line of a JSON Lines file."""
    lines = content.splitlines(keepends=True)
    try:
        return json.dumps(harm_tree(draw, json.loads(content))).encode()
    except ValueError:
        number = draw.randrange(len(lines)) if lines else 0
    try:
        lines[number] = json.dumps(harm_tree(draw, json.loads(lines[number]))).encode() + b"\n"
    except (ValueError, IndexError):
        return harm_bytes(draw, content)
    return b"".join(lines)


def harm_trace(draw: random.Random, content: bytes) -> bytes:
    """Damage one event of a `timeline.json`: a list without its last bracket."""
    head, *lines = content.splitlines(keepends=True)
    number = draw.randrange(len(lines) + 1)
    line = lines[number - 1] if number else head
    events = json.loads((b"" if not number else b"[") + line.rstrip().rstrip(b",") + b"]")
    harmed = json.dumps(harm_tree(draw, events)).encode()
    harmed = harmed if not number else harmed.strip(b"[]")
    harmed = (harmed.removesuffix(b"]") if not number else harmed) + b",\n"
    return (
        harmed + b"".join(lines)
        if not number
        else b"".join([head, *lines[: number - 1], harmed, *lines[number:]])
    )


def harm_toml(draw: random.Random, content: bytes) -> bytes:
    """Damage one value of a TOML file."""
    tree = harm_tree(draw, tomllib.loads(content.decode()))
    try:
        return tomli_w.dumps(tree).encode()
    except (TypeError, ValueError, AttributeError):  # TOML has no null, no surrogates
        return harm_bytes(draw, content)


SHAPES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    ".json": harm_json,
    ".jsonl": harm_json,
    ".toml": harm_toml,
}


def harm_file(draw: random.Random, path: Path) -> None:
    """Damage a file: its bytes, one value in it, or its place in the folder."""
    action = draw.random()
    if action < 0.05:
        path.unlink()
    elif action < 0.1:
        path.unlink()
        path.mkdir()
    elif action < 0.13:
        path.unlink()
        path.symlink_to(path.name)  # a loop
    elif action < 0.45 or path.suffix not in SHAPES:
        path.write_bytes(harm_bytes(draw, path.read_bytes()))
    elif path.name == "timeline.json":
        path.write_bytes(harm_trace(draw, path.read_bytes()))
    else:
        path.write_bytes(SHAPES[path.suffix](draw, path.read_bytes()))


def copied(folder: Path, to: Path) -> Path:
    """Return a copy of a folder, to be damaged."""
    return Path(shutil.copytree(folder, to))


def fields(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the type of every setting."""
    for name, field in schema.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = [k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)]
        yield f"{prefix}{name}", field.annotation
        if get_origin(field.annotation) is list:
            continue  # its sections have a place in their names
        for section in inner:
            yield from fields(section, f"{prefix}{name}.")


def written(value: Any) -> str:
    """Return a value as a user would type it behind `key=`."""
    try:
        return tomli_w.dumps({"v": value}).removeprefix("v = ").strip()
    except (TypeError, ValueError, AttributeError):
        return str(value).encode(errors="replace").decode()


def overrides(draw: random.Random, schema: type[BaseModel]) -> tuple[list[str], bool]:
    """Return one or two strange settings, and whether one of them can never be right."""
    chosen, wrong = [], False
    for name, kind in draw.sample(list(fields(schema)), draw.choice((1, 1, 2))):
        value = strange(draw)
        chosen.append(f"{name}={written(value)}")
        numeric = {int, float} & {kind, *get_args(kind)}
        wrong |= bool(numeric) and isinstance(value, float) and not math.isfinite(value)
    return chosen, wrong


def keys(chosen: list[str]) -> tuple[str, ...]:
    """Return what a message may call these settings: a setting, or the section with it."""
    names = [each.partition("=")[0].split(".") for each in chosen]
    return tuple(part for parts in names for part in parts[-2:])
