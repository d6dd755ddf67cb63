"""Generate `docs/configuration.md`: all settings, and the strategies of `engine.strategy`."""

from __future__ import annotations

from pydantic import ConfigDict, TypeAdapter, with_config

from tlt.config.reference import KEYS, line, reference
from tlt.strategy.adaptive import Caution
from tlt.strategy.spec import EXAMPLES


def page() -> str:
    """Return the page as Markdown."""
    kinds = "".join(f"strategy = {example}\n" for example in EXAMPLES.values())
    known = TypeAdapter(with_config(ConfigDict(use_attribute_docstrings=True))(Caution))
    rows = "".join(
        f"| `{key}` | `{of['type']}` | `{of['default']}` | {line(of['description'])} |\n"
        for key, of in known.json_schema()["properties"].items()
    )
    return (
        f"{reference()}\n## `engine.strategy`\n\nOne of every kind:\n\n```toml\n{kinds}```\n\n"
        "`adaptive` and `beg_mab` take `arms`, by default all of the engine.\n"
        f"`adaptive` also takes:\n{KEYS}{rows}"
    )


if __name__ == "__main__":
    import sys

    sys.stdout.write(page())
