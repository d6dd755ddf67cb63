"""A `vllm.LLM` of another program, built under `TLT_CONFIG` in the process of its trainer.

`HostedEngine` does for such an engine what `VllmCore` does for TLT's own: it stores the hidden
states of every sample that ends, loads policies and drafters, and refuses to continue with a policy
that is not the trainer's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tlt.contracts import WHOLE
from tlt.drafter.checkpoint import drafter_weights
from tlt.drafter.eagle3.config import Eagle3Config
from tlt.errors import ConfigError, WeightMismatch
from tlt.node.weights import SharedWeights
from tlt.states.buffer import BufferSettings
from tlt.strategy.controller import DraftController
from tlt.vllm.args import CONFIG_KEY

logger = logging.getLogger(__name__)


class HostedEngine:
    """One engine of another program, which runs in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        config = llm.llm_engine.vllm_config
        if CONFIG_KEY not in (config.additional_config or {}):
            raise ConfigError(
                "this vLLM engine runs without TLT: set TLT_CONFIG before the program builds it, "
                'e.g. TLT_CONFIG="drafter=models/policy-eagle3"'
            )
        if getattr(config.speculative_config, "method", None) != "eagle3":
            raise ConfigError(
                "this vLLM engine has no drafter to train: name one in TLT_CONFIG, e.g. "
                'TLT_CONFIG="drafter=models/policy-eagle3"'
            )
        self.drafter = Path(config.speculative_config.model)
        """Folder of the drafter that the engine started with."""
        self.strategy: dict[str, Any] = config.additional_config[CONFIG_KEY]["strategy"]
        """Spec of the strategy, with all arms named."""
        self.policy = str(config.model_config.model)
        """Folder or Hub name of the policy that the engine started with."""
        self.rl_step = 0
        """RL step of the samples to come."""
        self.num_recorded = 0
        """Samples whose hidden states were stored so far."""
        self.controller: DraftController = (
            llm.llm_engine.engine_core.engine_core.scheduler.controller
        )
        """Chooses the engine's arms, and counts their results."""
        self._names: dict[str, str] = {}
        """vLLM's own name of each request in flight."""

    # --- hidden states ------------------------------------------------------------------------

    def record(self, buffer: BufferSettings) -> None:
        """Store the hidden states of all samples from now on, each when it has ended."""
        engine = self._llm.llm_engine
        self._llm.collective_rpc("tlt_capture", args=(asdict(buffer),))
        add_request, step = engine.add_request, engine.step

        def add_and_note(request_id: str, *args: Any, **kwargs: Any) -> str:
            name: str = add_request(request_id, *args, **kwargs)
            self._names[request_id] = name
            return name

        def step_and_keep() -> Any:
            outputs = step()
            for output in outputs:
                if output.finished:
                    self._keep(output)
            return outputs

        engine.add_request, engine.step = add_and_note, step_and_keep

    def _keep(self, output: Any) -> None:
        name = self._names.pop(output.request_id, None)
        if name is None or len(output.outputs) != 1:
            return  # requests with n > 1 have names that only vLLM knows
        end = output.outputs[0]
        sample = output.request_id if end.finish_reason in WHOLE else None
        text = [*output.prompt_token_ids, *end.token_ids]
        kept = self._llm.collective_rpc("tlt_keep_states", args=(name, sample, self.rl_step, text))
        self.num_recorded = kept[0][0]

    # --- weights ------------------------------------------------------------------------------

    def load_policy(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load the trainer's policy; no request may run."""
        self._judge(self._llm.collective_rpc("tlt_load_policy", args=(tensors,)), "policy update")
        if not self._llm.reset_prefix_cache():
            raise WeightMismatch(
                "the engine keeps cached prefixes of the last policy: vLLM did not drop them"
            )

    def load_drafter(
        self, weights: Mapping[str, torch.Tensor], config: Eagle3Config, dtype: str, version: int
    ) -> None:
        """Load a drafter between two engine steps."""
        tensors = drafter_weights(weights, config, getattr(torch, dtype))
        with SharedWeights(tensors.items()) as shared:
            self._llm.collective_rpc("tlt_check_weights", args=(shared.manifest(), True))
            reports = self._llm.collective_rpc("tlt_update_weights", args=(shared.manifest(), True))
        self._judge(reports, "drafter swap")
        self.controller.drafter_version = version

    def _judge(self, reports: list[dict[str, Any]], what: str) -> None:
        """Refuse to continue with a policy that is not the trainer's."""
        differed = sorted({name for report in reports for name in report["differed"]})
        if any(report["still"] for report in reports):
            raise WeightMismatch(
                f"after a {what} the engine's policy is not the trainer's in "
                f"{', '.join(differed[:3])}; start the program without TLT_CONFIG"
            )
        if differed:
            logger.error("the policy was loaded again after a %s: %s", what, differed[0])
