"""Errors that callers distinguish. Users' mistakes are `ValueError`s."""


class ConfigError(ValueError):
    """A setting is wrong. The message names the key, what is wrong, and a value that works."""


class LossyError(ConfigError):
    """A setting would change the distribution of samples, or is not supported under speculation."""


class EngineError(RuntimeError):
    """An engine could not start, or does not behave as it should."""


class EngineGone(EngineError):
    """An engine's process has ended and its work is lost; other engines are not affected."""


class EngineUnsafe(EngineError):
    """The engine runs but fails its self-test: it would sample from the wrong distribution."""


class WeightMismatch(EngineError):
    """The engine may no longer generate from the learner's policy: it must be replaced."""


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; the learner itself is well."""


class TrainingFailed(RuntimeError):
    """The run learns nothing, and continuing would only cost time."""


class Terminated(BaseException):
    """A signal ended the run."""

    def __init__(self, number: int, done: str = "") -> None:
        super().__init__(f"ended by signal {number}{done}")
        self.exit_code = 128 + number


class LearnerLost(RuntimeError):
    """A rank of the learner died, failed or hangs: all ranks must restart."""
