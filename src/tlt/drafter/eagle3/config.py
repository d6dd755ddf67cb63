"""Shape of an EAGLE-3 drafter, derived from its target, in the config format vLLM reads.

New drafters have the norms of EAGLE-3.1: one for each fused state, and normed states from pass to
pass. They learn faster with them (benchmarks/losses.py). Published drafters differ by a few
switches, which are read here and kept: a drafter computes what it was trained for. `from_hf`
refuses forms that TLT does not compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tlt.errors import ConfigError

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
"""vLLM's names for the draft model, by the type of its layer."""
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
LARGE_VOCABULARY, DRAFT_VOCABULARY = 65536, 32768
"""Policies with more tokens than the first get drafters of the second many tokens by default."""
CPU_DRAFT_VOCABULARY = 4096
"""Tokens of a drafter that CPU cores train during a run."""


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Rotary embedding with stretched long waves, as in Llama 3.1."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """One decoder layer over three of the target's hidden states and the token embedding."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    """The target's hidden states that are fused: i is the input of layer i."""
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    norm_before_residual: bool = False
    """Whether the layer adds its output to the normed hidden state instead of the plain one."""
    norm_before_fc: bool = False
    """Whether one norm covers all fused states before they are fused (drafters of gpt-oss)."""
    fc_norm: bool = False
    """Whether each state has its own norm before the states are fused."""
    norm_output: bool = False
    """Whether a pass hands its normed state to the next pass instead of the plain one."""
    qk_norm: bool = False
    """Whether queries and keys are normed: layers of the Qwen3 type."""
    rope_scaling: Llama3Rope | None = None

    @property
    def drafts_all_tokens(self) -> bool:
        """Whether the draft vocabulary is the policy's."""
        return self.draft_vocab_size == self.vocab_size

    @classmethod
    def for_target(cls, target: Any, draft_vocab_size: int | None = None) -> Eagle3Config:
        """Derive the drafter of a Llama- or Qwen-type target from its Hugging Face config."""
        heads = target.num_attention_heads
        rope = getattr(target, "rope_parameters", None) or {}
        theta = rope.get("rope_theta") or getattr(target, "rope_theta", None) or 10000.0
        return cls(
            hidden_size=target.hidden_size,
            intermediate_size=target.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(target, "num_key_value_heads", None) or heads,
            head_dim=getattr(target, "head_dim", None) or target.hidden_size // heads,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size or target.vocab_size,
            aux_layer_ids=default_aux_layers(target.num_hidden_layers),
            rope_theta=float(theta),
            rms_norm_eps=target.rms_norm_eps,
            max_position_embeddings=target.max_position_embeddings,
            fc_norm=True,
            norm_output=True,
        )

    @property
    def num_parameters(self) -> int:
        """Parameters of the drafter; the embedding is the target's."""
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        per_hidden = len(self.aux_layer_ids) * self.hidden_size  # fusion
        per_hidden += 3 * queries + 4 * keys  # two inputs, one output
        per_hidden += 3 * self.intermediate_size + self.draft_vocab_size + 4  # MLP, head, norms
        per_hidden += len(self.aux_layer_ids) * (self.norm_before_fc + self.fc_norm)
        return self.hidden_size * per_hidden + 2 * self.head_dim * self.qk_norm

    def to_hf(self, dtype: str) -> dict[str, Any]:
        """Return the `config.json` of a drafter folder."""
        switches = {name: True for name in SWITCHES if getattr(self, name)}
        return self.layer_hf(dtype) | {
            "architectures": [ARCHITECTURES["qwen3" if self.qk_norm else "llama"]],
            "draft_vocab_size": self.draft_vocab_size,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            **switches,
        }

    def layer_hf(self, dtype: str) -> dict[str, Any]:
        """Return the part of the config that describes the decoder layer."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {"rope_type": "llama3", **asdict(self.rope_scaling)}
        return {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "dtype": dtype,
        }

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], num_target_layers: int | None = None
    ) -> Eagle3Config:
        """Read the `config.json` of a drafter folder.

        Drafters that do not say which hidden states they fuse take vLLM's, which follow from the
        target's number of layers.
        """
        _refuse_other_forms(config)
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        theta, scaling = _rope(config)
        return cls(
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=config["vocab_size"],
            draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
            aux_layer_ids=_aux_layers(config, num_target_layers),
            rope_theta=theta,
            rms_norm_eps=config["rms_norm_eps"],
            max_position_embeddings=config["max_position_embeddings"],
            **{name: bool(_said(config, name)) for name in SWITCHES},
            qk_norm=config.get("model_type") == "qwen3",
            rope_scaling=scaling,
        )


def _said(config: Mapping[str, Any], name: str) -> Any:
    """Return a setting of a drafter; some drafters keep it in a section."""
    return config.get(name) or (config.get("eagle_config") or {}).get(name)


def _refuse_other_forms(config: Mapping[str, Any]) -> None:
    """Refuse drafters whose computation differs from ours in a way that no switch describes."""
    target = config.get("target_hidden_size")
    form = {
        "model_type": (config.get("model_type", "llama"), ("llama", "qwen3")),
        "num_hidden_layers": (config.get("num_hidden_layers", 1), (1,)),
        "target_hidden_size": (target or config["hidden_size"], (config["hidden_size"],)),
        "attention_bias": (bool(config.get("attention_bias")), (False,)),
        "mlp_bias": (bool(config.get("mlp_bias")), (False,)),
        "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
        "sliding attention": ("sliding_attention" in (config.get("layer_types") or ()), (False,)),
        "parallel drafting": ("ptd_token_id" in config or "pard_token" in config, (False,)),
    }
    for name, (found, known) in form.items():
        if found not in known:
            takes = " or ".join(map(str, known))
            raise ConfigError(
                f"this drafter has {name} = {found}, which TLT does not compute (it computes "
                f"{takes}); take another drafter, or make one with `tlt drafter train`"
            )


def _rope(config: Mapping[str, Any]) -> tuple[float, Llama3Rope | None]:
    """Return base and scaling of the rotary embedding, in the form of any version."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return theta, None
    if kind == "llama3":
        names = Llama3Rope.__dataclass_fields__
        return theta, Llama3Rope(**{name: rope[name] for name in names})
    raise ConfigError(
        f"this drafter has a rotary embedding of the type {kind!r}, which TLT does not compute "
        "(default or llama3); take another drafter, or make one with `tlt drafter train`"
    )


def _aux_layers(config: Mapping[str, Any], num_target_layers: int | None) -> tuple[int, ...]:
    if layers := _said(config, "eagle_aux_hidden_state_layer_ids"):
        return tuple(layers)
    if num_target_layers is None:
        raise ConfigError(
            "this drafter does not say which hidden states it reads; export it for its model with "
            "`tlt drafter export DRAFTER --model MODEL --out FOLDER`, and use that folder"
        )
    return (2, num_target_layers // 2, num_target_layers - 3)


def harvest_draft_vocabulary(vocab_size: int, on_gpu: bool) -> int:
    """Return the size of the vocabulary of a drafter that a run makes and trains.

    A CPU core has a few minutes for training, and a large head would take most of them.
    """
    default = default_draft_vocabulary(vocab_size)
    return default if on_gpu else min(default, CPU_DRAFT_VOCABULARY)


def default_draft_vocabulary(vocab_size: int) -> int:
    """Return the size of a new drafter's vocabulary: all tokens, unless the policy has many.

    The head is most of a drafter with a large vocabulary, and rare tokens are almost never drafted.
    """
    return DRAFT_VOCABULARY if vocab_size > LARGE_VOCABULARY else vocab_size


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Return a low, a middle and a high layer: vLLM's 2, L/2 and L-3, spread in shallow models."""
    layers = (2, num_layers // 2, num_layers - 3)
    if len(set(layers)) == 3 and list(layers) == sorted(layers):
        return layers
    if num_layers < 3:
        raise ValueError(f"EAGLE-3 fuses three hidden states; the target has {num_layers} layers")
    return (1, max(2, num_layers // 2), num_layers - 1) if num_layers > 3 else (0, 1, 2)
