"""Load a config from a TOML file and dotted overrides, with one clear line for each mistake."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tlt.errors import ConfigError

S = TypeVar("S", bound=BaseModel)

MAX_DEPTH = 8
"""Most parts of a dotted name."""
MAX_SHOWN = 100
"""Characters of a wrong value that a message shows."""


def load_config(schema: type[S], path: Path, overrides: Sequence[str] = ()) -> S:
    """Read `path`, apply `section.key=value` overrides (values as in TOML), and validate."""
    return check(schema, apply_overrides(read_toml(path), overrides), str(path))


RUN_FILE = "name a run's TOML file, such as one that `tlt init` writes"
"""The way out for a command that reads the settings of a run."""


def read_toml(path: Path, way_out: str = RUN_FILE) -> dict[str, Any]:
    """Read a TOML file; raise a `ConfigError` with a way out that names the file if that fails."""
    try:
        return tomllib.loads(path.read_bytes().decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        kind = "is a folder" if isinstance(error, IsADirectoryError) else "does not exist"
        raise ConfigError(f"{path} {kind}; {way_out}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); allow reading it") from error
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise ConfigError(
            f"{path} is not valid TOML: {error}; settings look like num_steps = 100 or "
            'model = "models/tiny", under a heading like [run]'
        ) from error


def read_json(path: Path, what: str, way_out: str) -> dict[str, Any]:
    """Read an object from a JSON file; `what` it should be and the way out are for the message."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {way_out}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; {way_out}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not {what}; {way_out}")
    return found


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Set every `section.key=value` in `tree`, and return `tree`."""
    for override in overrides:
        dotted, separator, text = override.partition("=")
        keys = dotted.strip().split(".")
        if not separator or not all(keys) or len(keys) > MAX_DEPTH:
            raise ConfigError(
                f"override {shown(override)} is not section.key=value; e.g. learner.lr=1e-6"
            )
        place = tree
        for key in keys[:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise ConfigError(
                    f"override {shown(override)}: {key} is a value, not a section; set {key} "
                    f"itself, e.g. {key}=..."
                )
        place[keys[-1]] = _value(text.strip())
    return tree


def _value(text: str) -> Any:
    """Parse a TOML value. A bare word is a string, because shells remove quotes."""
    try:
        found = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return found["value"] if len(found) == 1 else text


def check(schema: type[S], tree: Mapping[str, Any], where: str) -> S:
    """Validate `tree`; raise a `ConfigError` with one line for each mistake in `where`."""
    try:
        return schema.model_validate(tree)
    except ValidationError as error:
        raise _refusal(schema, error.errors(), where) from None


def check_types(schema: type[BaseModel], tree: Mapping[str, Any], where: str) -> None:
    """Refuse values of a wrong type in the settings of a run that is over.

    Keys and values that today's schema refuses come from an earlier version.
    """
    try:
        schema.model_validate(tree)
    except ValidationError as error:
        wrong = [p for p in error.errors() if p["type"].endswith(("_type", "_parsing"))]
        if wrong:
            raise _refusal(schema, wrong, where) from None


def _refusal(schema: type[BaseModel], problems: Sequence[Any], where: str) -> ConfigError:
    return ConfigError(f"{where}: " + "\n  ".join(_explain(schema, each) for each in problems))


def _explain(schema: type[BaseModel], problem: Any) -> str:
    """Return the key, what is wrong, and a value that works."""
    location = [str(part) for part in problem["loc"]]
    key = ".".join(location)
    fields, field = _find(schema, location)
    if problem["type"] == "extra_forbidden":
        name = location[-1]
        initials = "".join(word[:1] for word in name.split("_"))  # lr, for learning_rate
        close = [initials] if initials in fields else difflib.get_close_matches(name, fields, 1)
        hint = f"did you mean {close[0]}?" if close else f"known here: {', '.join(fields)}"
        return f"{key} is not a setting; {hint}"
    section = schema_of(field.annotation) if field is not None else None
    if section is not None and problem["type"] in ("missing", "model_type"):
        wrong = "is missing" if problem["type"] == "missing" else "is a section, not a value"
        return f"{key} {wrong}; e.g. [{key}]{_required(section)}"
    if problem["type"] == "missing":
        return f"{key} is missing{_help(field) or '; set it'}"
    given = problem.get("input")
    message = problem["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    value = f" = {shown(given)}" if isinstance(given, str | int | float | bool) else ""
    return f"{key}{value} should be {message}{_help(field)}"


def _help(field: FieldInfo | None) -> str:
    """Return a value that works and the description of the field, to end a message with."""
    if field is None:
        return ""
    example = ""
    default = field.get_default(call_default_factory=True)
    if default is not PydanticUndefined and default is not None:
        example = f"; e.g. {_toml(default)}"
    elif field.examples:
        example = f"; e.g. {_toml(field.examples[0])}"
    elif default is None:
        example = "; or leave it out"
    meaning = " ".join((field.description or "").split())
    return f"{example} ({meaning})" if meaning else example


def shown(value: Any) -> str:
    """Return a value as the user wrote it, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "a huge number"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _required(section: type[BaseModel]) -> str:
    """Return the settings that a section needs, with example values."""
    lines = [
        f"{name} = {_toml(field.examples[0])}"
        for name, field in section.model_fields.items()
        if field.is_required() and field.examples
    ]
    return f" with {', '.join(lines)}" if lines else ""


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _find(
    schema: type[BaseModel], location: Sequence[str]
) -> tuple[Mapping[str, FieldInfo], FieldInfo | None]:
    """Return all settings of the section that holds `location`, and the one at `location`."""
    fields: Mapping[str, FieldInfo] = schema.model_fields
    location = [part for part in location if not part.isdecimal()]  # places in a list
    for part in location[:-1]:
        inner = schema_of(fields[part].annotation) if part in fields else None
        if inner is None:
            return fields, fields.get(part)
        fields = inner.model_fields
    return fields, fields.get(location[-1])


def schema_of(annotation: Any) -> type[BaseModel] | None:
    """Return the schema of a section, also of an optional one; None for a plain value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
