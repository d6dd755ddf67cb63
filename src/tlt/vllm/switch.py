"""One switch for any program that uses vLLM: the environment variable `TLT_CONFIG`.

The variable names a TOML file, or holds `key=value` settings, or both: a file and changes to it.
The keys are the part of `[engine]` that says how an engine drafts (`SwitchConfig`). The program
decides the rest: this module takes the program's vLLM arguments, and returns the ones to change. It
refuses arguments that TLT cannot work with, and leaves engines alone that are TLT's own or that
generate nothing. `tlt.vllm.wiring` is the half that touches vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tlt.config.load import apply_overrides, check, read_toml
from tlt.config.rollout import EngineConfig, SwitchConfig
from tlt.errors import ConfigError, LossyError
from tlt.models.folder import check_drafter
from tlt.models.hub import local_folder
from tlt.strategy.spec import build_strategy
from tlt.vllm.args import CONFIG_KEY, GRAPH_ARGS, engine_args, strategy_spec
from tlt.vllm.environment import SWITCH_VARIABLE as VARIABLE

EXAMPLE = f'{VARIABLE}="drafter=models/policy-eagle3 strategy.kind=adaptive"'
_WORDS = re.compile(r"""(?:[^\s"']|"[^"]*"|'[^']*')+""")
"""Words between blanks, where blanks within quotes belong to the word."""
_READ = {"async_scheduling", "max_num_seqs", "max_num_batched_tokens", *GRAPH_ARGS}
"""Arguments of the program that decide about ours."""
_WRITTEN = (
    *("scheduler_cls", "worker_cls", "speculative_config", "async_scheduling"),
    *("compilation_config", "weight_transfer_config"),
)
"""Arguments that TLT sets, unless `given` holds them; `additional_config` is completed."""


@dataclass(frozen=True, slots=True)
class Wiring:
    """Arguments of vLLM to change, and a line for the log."""

    changes: Mapping[str, Any]
    message: str


def read_settings(text: str) -> SwitchConfig:
    """Return the settings of a TOML file, of `key=value` words, or of a file and words."""
    words = _WORDS.findall(text)
    tree: dict[str, Any] = {}
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        path = Path(words.pop(0))
        if not path.is_file():
            raise ConfigError(
                f"{VARIABLE}: there is no file {str(path)!r} in {Path.cwd()}; name a TOML file by "
                f"its full path, or write settings, e.g. {EXAMPLE}"
            )
        tree = read_toml(path)
    for word in words:
        if "=" not in word:
            raise ConfigError(
                f"{VARIABLE}: {word!r} is not key=value; blanks end a setting, so write lists "
                f"without blanks, e.g. {EXAMPLE}"
            )
    return check(SwitchConfig, apply_overrides(tree, words), VARIABLE)


def wire(
    text: str, given: Mapping[str, Any], on_gpu: bool, runner_type: Callable[[], str]
) -> Wiring | None:
    """Return what to change in a program's arguments of vLLM; None leaves the engine alone.

    `given` holds the arguments that differ from vLLM's defaults, and always the model.
    `runner_type` returns what vLLM runs the model for; an engine for pooling generates nothing.
    """
    if not text.strip():
        return None
    extra = given.get("additional_config") or {}
    if not isinstance(extra, Mapping):
        raise ConfigError(
            f"{VARIABLE}: additional_config = {repr(extra)[:60]} must be a dict, because TLT must "
            "add its strategy; e.g. {}"
        )
    if CONFIG_KEY in extra:
        return None  # TLT's engine, or an engine wired earlier
    settings = read_settings(text)
    model = _model_settings(str(given["model"]))
    if runner_type() != "generate":
        return None
    _check_program(given)
    drafter = _drafter_folder(settings, model)
    if not on_gpu:
        # vLLM always schedules synchronously on CPUs.
        given = {key: value for key, value in given.items() if key != "async_scheduling"}
    config = _engine_config(settings, drafter, given, on_gpu)
    args = engine_args(config)
    changes = {key: args[key] for key in _WRITTEN if key in args and key not in given}
    drafts = changes.get("speculative_config")
    if given.get("load_format") == "dummy" and drafts and drafter is not None:
        # The program loads its policy later. Nothing else would load the drafter.
        changes["speculative_config"] = drafts | {"draft_load_config": {"load_format": "auto"}}
    ours = args["additional_config"][CONFIG_KEY] | {"embedded": True}
    changes["additional_config"] = {**extra, CONFIG_KEY: ours}
    if on_gpu:
        kept = given.get("sleep_preserve_parameter_names") or []
        changes["sleep_preserve_parameter_names"] = [*kept, "draft.*"]
    return Wiring(changes, _message(settings, config))


def _model_settings(model: str) -> Mapping[str, Any]:
    """Return the settings of a model's folder; empty for other names, which vLLM resolves.

    Refuse a drafter's folder in place of a model, which vLLM would take for both.
    """
    try:
        found = json.loads((Path(model) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    if "speculators_model_type" in found:
        raise ConfigError(
            f"{VARIABLE}: the program's model = {model!r} is a drafter, from which vLLM takes "
            f'model and drafts; name the policy as the model, and set {VARIABLE}="drafter={model}"'
        )
    text = found.get("text_config")  # for multimodal models
    return text if isinstance(text, dict) else found


def _check_program(given: Mapping[str, Any]) -> None:
    """Refuse arguments of the program that TLT cannot work with."""
    for key in ("scheduler_cls", "worker_cls"):
        if key in given:
            raise ConfigError(
                f"{VARIABLE}: the program sets {key} = {given[key]!r}, and TLT brings its own; "
                f"leave {key} out, or start the program without {VARIABLE}"
            )
    for key in ("speculative_config", "spec_method", "spec_model", "spec_tokens"):
        if key in given:
            raise ConfigError(
                f"{VARIABLE}: the program sets {key} = {repr(given[key])[:120]}, and TLT chooses "
                f"the drafts; leave {key} out, and name a drafter in {VARIABLE}, e.g. "
                f"{_instead(given)}"
            )
    if given.get("logits_processors"):
        raise LossyError(
            f"{VARIABLE}: the program sets logits_processors, which do not see drafted tokens; "
            "leave them out, or start the program without TLT_CONFIG"
        )
    if int(given.get("data_parallel_size", 1)) > 1:
        raise ConfigError(
            f"{VARIABLE}: data_parallel_size = {given['data_parallel_size']} inside one engine "
            "turns vLLM's draft lengths off; use 1, and one engine for each replica"
        )
    for key in ("watermark_config", "diffusion_config"):
        if key in given:
            raise LossyError(
                f"{VARIABLE}: {key} changes how vLLM samples, and TLT brings its own sampler; "
                f"leave {key} out, or start the program without {VARIABLE}"
            )


def _drafter_folder(settings: SwitchConfig, model: Mapping[str, Any]) -> str | None:
    """Return the folder of the model's drafter; an id of the Hub is downloaded."""
    if settings.drafter is None:
        return None
    folder = local_folder(settings.drafter, f"{VARIABLE}: drafter")
    if not folder.is_dir():
        raise ConfigError(
            f"{VARIABLE}: drafter = {settings.drafter!r} is not a folder, seen from {Path.cwd()}; "
            "name the folder of an EAGLE-3 drafter by its full path, or its id on the Hub, or "
            "leave it out for n-grams"
        )
    if {"hidden_size", "vocab_size"} <= model.keys() and any(folder.glob("*.safetensors")):
        check_drafter(folder, model, f"{VARIABLE}: drafter")
    return str(folder)


def _instead(given: Mapping[str, Any]) -> str:
    """Return settings of TLT in place of the program's own speculation."""
    own = given.get("speculative_config")
    model = (own.get("model") if isinstance(own, Mapping) else None) or given.get("spec_model")
    return f'{VARIABLE}="drafter={model}"' if model else f'{VARIABLE}="strategy.kind=adaptive"'


def _engine_config(
    settings: SwitchConfig, drafter: str | None, given: Mapping[str, Any], on_gpu: bool
) -> EngineConfig:
    workers = int(given.get("tensor_parallel_size", 1))
    return EngineConfig(
        model=str(given["model"]),
        num_gpus=workers if on_gpu else 0,
        num_cores=1 if on_gpu else workers,
        engine_args={key: given[key] for key in sorted(_READ & given.keys())},
        **{name: getattr(settings, name) for name in SwitchConfig.model_fields}
        | {"drafter": drafter},
    )


def _message(settings: SwitchConfig, config: EngineConfig) -> str:
    strategy = strategy_spec(config)
    arms = sorted(map(str, build_strategy(strategy).arms()))
    drafter = f"the drafter {settings.drafter}" if settings.drafter else "n-grams"
    drafts = f"drafts with {drafter}" if arms != ["off"] else "does not draft"
    return (
        f"TLT is on ({VARIABLE}): this engine {drafts}, the strategy {strategy['kind']!r} chooses "
        f"from {', '.join(arms)}; samples stay the policy's"
    )
