"""Settings that users write: frozen pydantic schemas that refuse unknown keys. No torch here."""
