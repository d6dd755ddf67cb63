"""Generate `docs/scenario.md`, the reference page of a scenario's settings, from the schema."""

from __future__ import annotations

from tlt.config.load import schema_of
from tlt.config.reference import tables
from tlt.simulate.scenario import ScenarioConfig

HEADER = """# Scenario

All settings of `tlt simulate`, to model a cluster with the [simulator](simulator.md). Settings
under `scenario` stand at the top of the TOML file, all others under a heading such as `[cluster]`.
`tlt simulate cluster.num_engines=64` changes a setting for one simulation. Unknown keys are
refused. The section `[tlt]` is the same as in [a run](configuration.md#tlt): `session_s`,
`lease_s`, `min_lease_s`, `stop_timeout_s` and `max_trainers` change harvest here, too.

This page is generated from the schema in `src/tlt/simulate/scenario.py`
(`python -m tlt.simulate.reference > docs/scenario.md`); a test compares them.
"""


def reference() -> str:
    """Return the page as Markdown."""
    fields = {name: field.annotation for name, field in ScenarioConfig.model_fields.items()}
    schemas = [(name, schema_of(kind)) for name, kind in fields.items() if name != "tlt"]
    sections = [(name, schema) for name, schema in schemas if schema is not None]
    return HEADER + tables([("scenario", ScenarioConfig), *sections])


if __name__ == "__main__":
    import sys

    sys.stdout.write(reference())
