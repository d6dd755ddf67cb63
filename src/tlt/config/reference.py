"""The reference of all settings, from the schemas.

`tlt.strategy.reference` adds the strategies, and writes `docs/configuration.md`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tlt.config.load import schema_of
from tlt.config.train import TrainConfig

HEADER = """# Configuration

All settings of `tlt train`, as a run's TOML file holds them. Unknown keys are refused.
`tlt train run.toml learner.lr=1e-6` changes a setting for one run. `tlt train run.toml --check`
checks all settings, the model and the data, and starts nothing.

This page is generated from the schemas in `src/tlt/config`
(`python -m tlt.strategy.reference > docs/configuration.md`); a test compares them.
"""
KEYS = "\n| key | type | default | description |\n|---|---|---|---|\n"


def reference() -> str:
    """Return the page as Markdown, up to the strategies."""
    return HEADER + tables(SECTIONS)


def _sections(
    schema: type[BaseModel], prefix: str, seen: set[type[BaseModel]]
) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield the name and schema of every section, each schema once."""
    for key, field in schema.model_fields.items():
        inner = schema_of(field.annotation)
        if inner is not None and inner not in seen:
            seen.add(inner)
            yield f"{prefix}{key}", inner
            yield from _sections(inner, f"{prefix}{key}.", seen)


SECTIONS = tuple(_sections(TrainConfig, "", set()))


def tables(sections: Sequence[tuple[str, type[BaseModel]]]) -> str:
    """Return a heading and a table of keys for every section; sections are not listed as keys."""
    parts = []
    names = {name for name, _ in sections}
    for name, schema in sections:
        parts.append(f"\n## `{name}`\n\n{schema.__doc__}\n")
        parts.append(KEYS)
        for key, field in schema.model_fields.items():
            if key in names and "." not in name:
                continue
            kind = str(getattr(field.annotation, "__name__", field.annotation))
            if "[" in str(field.annotation) or "|" in str(field.annotation):
                kind = str(field.annotation)
            kind = re.sub(r"typing\.|tlt\.config\.\w+\.", "", kind)
            kind = re.sub(r"Annotated\[(\w+), FieldInfo\(.*?\)\]\)\]", r"\1", kind)
            text = line(field.description or "")
            kind = kind.replace(" | ", " or ")  # the site shows the backslash of an escaped bar
            parts.append(f"| `{key}` | `{kind}` | {_default(field)} | {text} |\n")
    return "".join(parts)


def line(text: str) -> str:
    """Return a docstring in one line."""
    return " ".join(text.split())


def _default(field: object) -> str:
    factory = getattr(field, "default_factory", None)
    value = factory() if factory is not None else getattr(field, "default", PydanticUndefined)
    if value is PydanticUndefined:
        return "required"
    return f"`{value.model_dump() if isinstance(value, BaseModel) else value!r}`"
