"""Files of problems, as users give them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows as parquet or as JSON lines, by the name; return the path."""
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
