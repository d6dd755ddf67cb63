"""The worker's half of the switch: an engine of a program that knows nothing of TLT.

Such a program asks for no report, so the worker runs the self-test itself. The program loads its
policy in its own way, so no file says what the policy should be: a drafter swap compares the policy
before and after.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform

from tlt.errors import ConfigError, EngineError, WeightMismatch
from tlt.node.weights import read_weights
from tlt.vllm import compat
from tlt.vllm.args import CONFIG_KEY
from tlt.vllm.environment import SWITCH_VARIABLE


class EmbeddedWorker:
    """Our workers' methods in an engine of another program, mixed in before vLLM's class."""

    @property
    def is_embedded(self) -> bool:
        """Whether `tlt.vllm.switch` put TLT into this engine."""
        settings = self.vllm_config.additional_config[CONFIG_KEY]  # type: ignore[attr-defined]
        return bool(settings.get("embedded"))

    def compile_or_warm_up_model(self) -> Any:
        """Get ready for the first request, and refuse an engine that would sample wrongly."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        if self.is_embedded:
            self._refuse_faults()
        return times

    def _refuse_faults(self) -> None:
        drafts = self.vllm_config.speculative_config is not None  # type: ignore[attr-defined]
        report = self.tlt_report(self_test=drafts)  # type: ignore[attr-defined]
        faults = [*report["faults"], *report["drafter_faults"]]
        faults += [f"{name} is not the policy's" for name in report["policy_faults"]]
        if not report["plugin"]:
            faults.append("vLLM did not load the plug-in; unset VLLM_PLUGINS or add 'tlt' to it")
        if not compat.version_supported(report["vllm"], on_cpu := current_platform.is_cpu()):
            wanted = compat.supported_versions(on_cpu)
            faults.append(f"vLLM {report['vllm']} is not supported; pip install '{wanted}'")
        if faults:
            raise EngineError(
                f"this engine failed TLT's self-test: {'; '.join(faults[:3])}. Start the program "
                f"without {SWITCH_VARIABLE}, and see `tlt doctor`"
            )

    # --- hidden states ------------------------------------------------------------------------

    _keeps_all = False
    """Whether the worker stores the states of every ended sample."""
    _num_policies = 0
    """Policies that the program loaded: the RL step of the samples to come."""

    def tlt_record(self, buffer: dict[str, Any]) -> None:
        """Store the hidden states of all samples from now on, each when it has ended."""
        self.tlt_capture(buffer)  # type: ignore[attr-defined]
        self._keeps_all = True

    def tlt_keep_whole(self, whole: dict[str, list[int]]) -> None:
        """Store the states of whole samples, given their texts, if the worker was told to."""
        for name, text in whole.items() if self._keeps_all else ():
            self.tlt_keep_states(name, name, self._num_policies, text)  # type: ignore[attr-defined]

    def _keep_ended(self, scheduler_output: Any) -> None:
        """Store the states of samples that ended in earlier engine steps; drop all others."""
        self.tlt_keep_whole(getattr(scheduler_output, "tlt_whole", {}))
        self._recorder.drop(scheduler_output.finished_req_ids)  # type: ignore[attr-defined]

    # --- weights ------------------------------------------------------------------------------

    def tlt_swap_drafter(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Load new drafter weights in one call, and prove that the policy did not change.

        Weights that do not fit change nothing. The program's weight transfer is not involved.
        """
        drafter = self._runner.draft_model  # type: ignore[attr-defined]
        if drafter is None:
            raise ConfigError(
                "this engine has no drafter; start the program with "
                f'{SWITCH_VARIABLE}="drafter=FOLDER"'
            )
        self.tlt_check_weights(manifest, draft=True)  # type: ignore[attr-defined]
        config = self.vllm_config  # type: ignore[attr-defined]
        watch = self._watch  # type: ignore[attr-defined]
        started_s = time.monotonic()
        watch.expect_present()
        seconds = time.monotonic() - started_s
        with set_current_vllm_config(config):
            compat.begin_reload(drafter)
            compat.load(drafter, read_weights(manifest["path"]))
            compat.end_reload(drafter, config.speculative_config.draft_model_config)
        self._renew_drafter()  # type: ignore[attr-defined]
        started_s = time.monotonic()
        if differed := watch.differing():
            raise WeightMismatch(f"a drafter swap changed the policy in {', '.join(differed[:3])}")
        seconds += time.monotonic() - started_s
        return {"differed": [], "still": [], "seconds": seconds}

    def tlt_policy_changed(self) -> None:
        """Note a policy that the program loaded.

        On CPUs vLLM does not renew a head that is tied to the embedding: it is packed again here.
        The drafter takes the policy's embedding and head if its checkpoint has none. Without this
        call, drafts are worse until the next swap, and samples come from that old head.
        """
        compat.repack_tied_heads(self.get_model())  # type: ignore[attr-defined]
        self._renew_drafter()  # type: ignore[attr-defined]
        self._drop_states()  # type: ignore[attr-defined]
        self._watch.expect_present()  # type: ignore[attr-defined]
        self._num_policies += 1

    # vLLM's own ways to load a policy make that call themselves.

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        if self.is_embedded:
            self.tlt_policy_changed()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()  # type: ignore[misc]
        if self.is_embedded:
            self.tlt_policy_changed()
