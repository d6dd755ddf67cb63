"""The process of one check: `python -m tlt.doctor module:function place.json answer.json`."""

from __future__ import annotations

import json
import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from tlt.doctor.place import Place


def main(target: str, place: Path, answer: Path) -> None:
    """Run one check and write its answer: notes, or an error with its traceback."""
    module, _, name = target.partition(":")
    found: dict[str, Any]
    try:
        notes = getattr(import_module(module), name)(Place.read(place))
        found = {"notes": notes}
    except BaseException as error:
        # The process ends here, so that the report gets every kind of error.
        found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(found, default=str))
    partial.rename(answer)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an engine that hangs must not hold up the answer
