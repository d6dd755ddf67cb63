"""Errors that callers may want to tell apart. Users' mistakes are `ValueError`s."""


class ConfigError(ValueError):
    """A setting is wrong. The message names the key, what is wrong, and a value that works."""


class LossyError(ConfigError):
    """A setting would change the distribution of samples, or is not supported under speculation."""


class EngineError(RuntimeError):
    """An engine could not start, or is not what it should be."""


class EngineUnsafe(EngineError):
    """The engine runs but fails its self-test: it would sample from the wrong distribution."""
