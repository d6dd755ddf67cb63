"""What users write down: pydantic schemas, frozen, unknown keys refused. No torch here."""
