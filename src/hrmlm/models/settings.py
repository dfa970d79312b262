"""Settings that families share."""

from typing import Annotated

from pydantic import ConfigDict, Field, model_validator

from hrmlm.config import Number, Positive, StrictConfig
from hrmlm.models.blocks import Block

Probability = Annotated[Number, Field(ge=0, lt=1)]


class ModelConfig(StrictConfig):
    """Settings of every family. Defaults are those of the house block: 16·D² weights, one head per 64 channels.

    vocab_size: rows of the embedding (None: taken from the data); used_vocab: ids from here on stand for no text
    and are never predicted (None: all are used); context: the most positions the model sees at once; hidden: width
    inside the feed-forward layer (None: 4·d_model); n_heads (None: one per 64 channels); n_kv_heads (None: n_heads).
    """

    model_config = ConfigDict(allow_inf_nan=False)

    family: str
    vocab_size: Positive | None = None
    used_vocab: Positive | None = None
    context: Positive = 1024
    d_model: Positive = 256
    n_heads: Positive | None = None
    n_kv_heads: Positive | None = None
    hidden: Positive | None = None
    dropout: Probability = 0.0
    norm_eps: Annotated[Number, Field(gt=0)] = 1e-5
    rope_theta: Annotated[Number, Field(gt=0)] = 10_000.0

    @classmethod
    def hint(cls, key: str) -> str:
        """Of a key that other families have: which."""
        from hrmlm.models.registry import families  # it knows us too

        others = [name for name, (config, _) in families().items() if key in config.model_fields]
        return f"a setting of {', '.join(others)}" if others else super().hint(key)

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.n_heads or max(1, self.d_model // 64)

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.n_kv_heads or self.heads

    @property
    def n_predicted(self) -> int:
        """Number of ids the head gives a logit to."""
        assert self.vocab_size is not None
        return self.used_vocab or self.vocab_size

    @model_validator(mode="after")
    def _check_shapes(self) -> "ModelConfig":
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            raise ValueError(f"d_model {self.d_model} must be n_heads ({self.heads}) times an even head size")
        if self.heads % self.kv_heads:
            raise ValueError(f"n_kv_heads {self.kv_heads} must divide n_heads {self.heads}")
        if self.vocab_size and self.used_vocab and self.used_vocab > self.vocab_size:
            raise ValueError(f"used_vocab {self.used_vocab} exceeds vocab_size {self.vocab_size}")
        return self

    def block(self) -> Block:
        """A new block of these widths."""
        hidden = self.hidden or 4 * self.d_model
        return Block(self.d_model, self.heads, self.kv_heads, hidden, self.norm_eps, self.dropout)


class RecurrentConfig(ModelConfig):
    """Settings of families that apply the same weights M times (models of recurrent depth).

    gradient_window: K, the last K of the M repeated steps are inside the graph (None: K = M, all of them);
    scaled_init: repeated weights from N(0, (0.02/√M)²). Two ways to make the readout of every depth a usable
    prediction: exit_probability: share of training steps that end after a random smaller depth; exit_weight: in the
    other steps, pull the readout of a random smaller depth towards that of the full one, by this weight of their KL
    divergence in nats, measured at every `exit_every`-th position.
    """

    gradient_window: Positive | None = None
    scaled_init: bool = True
    exit_probability: Annotated[Number, Field(ge=0, le=1)] = 0.0
    exit_weight: Annotated[Number, Field(ge=0, allow_inf_nan=False)] = 0.0
    exit_every: Positive = 4

    @property
    def total_steps(self) -> int:
        """M: how many times the repeated weights are applied."""
        raise NotImplementedError

    @property
    def window(self) -> int:
        """K, the gradient window in steps."""
        return self.gradient_window or self.total_steps

    @property
    def trains_exits(self) -> str | None:
        """Name of the setting that trains smaller depths, None if there is none."""
        return next((name for name in ("exit_weight", "exit_probability") if getattr(self, name)), None)

    @model_validator(mode="after")
    def _check_window(self) -> "RecurrentConfig":
        if self.window > self.total_steps:
            raise ValueError(
                f"gradient_window {self.gradient_window} exceeds the {self.total_steps} steps of the model"
            )
        return self

    @model_validator(mode="after")
    def _check_exit_weight(self) -> "RecurrentConfig":
        if self.exit_weight and self.exit_probability == 1:
            raise ValueError("exit_weight without effect: with exit_probability 1 no step runs the full depth")
        if not self.exit_weight and self.exit_every != type(self).model_fields["exit_every"].default:
            raise ValueError("exit_every without effect: exit_weight is 0")
        return self
