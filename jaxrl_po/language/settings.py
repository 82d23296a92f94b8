"""Sizes and switches of language problems and models, as records for command lines and logs."""

from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    ConfigError,
    Interval,
    check,
    common,
    record,
    static,
)
from jaxrl_po.language import sampling
from jaxrl_po.language.mismatch import AUTO, DTYPES, OLD_LOG_PROBS
from jaxrl_po.language.pretrained import architectures
from jaxrl_po.language.pretrained.shapes import SHAPES
from jaxrl_po.language.transformer import Transformer

NUCLEUS, PART = Interval(0.0, 1.0, open_low=True), Interval(0.0, 1.0, open_high=True)


@record
class SamplingSettings:
    """Sizes of a language problem and settings of its sampling, for tasks and dialogues."""

    num_prompts: int = common.static(64, "prompts per iteration, over all devices", within=COUNT)
    group_size: int = common.static(8, "completions per prompt", within=COUNT)
    max_new_tokens: int = common.static(
        0,
        "token budget of a completion, or of one message of a dialogue, EOS included; 0 takes the "
        "task's longest answer",
        unit="tokens",
    )
    temperature: float = common.static(
        1.0, "temperature of the policy, in sampling and in the loss", within=POSITIVE
    )
    top_k: int = static(
        0,
        "sample from the k most likely tokens only; 0 for all",
        unit="tokens",
        within=NON_NEGATIVE,
    )
    top_p: float = static(
        1.0,
        "sample from the most likely tokens that reach the probability top_p together; 1 for all",
        within=NUCLEUS,
    )
    min_p: float = static(
        0.0,
        "sample from the tokens with at least this part of the largest probability; 0 for all",
        within=PART,
    )
    old_log_prob: str = static(
        AUTO,
        "source of the old policy's log-probabilities in the ratio: the sampler, or a forward "
        "pass of the learner before its first step; auto takes the learner where the two differ: "
        "if the model computes below float32, or an accelerator multiplies matrices in TF32",
        choices=OLD_LOG_PROBS,
    )

    @property
    def decoding(self) -> sampling.Decoding:
        """Budget, temperature and filters of sampling, as a `Decoding`."""
        filters = self.top_k, self.top_p, self.min_p
        return sampling.Decoding(self.max_new_tokens, self.temperature, *filters)


@record
class LanguageSettings(SamplingSettings):
    """Sizes and switches of a task's problem, as a record for command lines and logs."""

    process_reward: bool = static(
        False, "reward each correct token or step, in place of the whole answer at its end"
    )
    prompt_set: int = static(
        0,
        "size of a fixed set of training prompts, drawn once; 0 draws fresh prompts",
        unit="prompts",
        within=NON_NEGATIVE,
    )


@record
class Computation:
    """Settings of a transformer's computation that do not depend on its sizes."""

    dtype: str = static("float32", "dtype of the matrix products", choices=tuple(DTYPES))
    remat: bool = static(
        False,
        "recompute the activations inside blocks in the backward pass: less memory, more time",
    )
    fused_attention: bool = static(
        False,
        "compute the attention of training in one kernel that holds no scores: cuDNN's on a GPU, "
        "splash attention on a TPU",
    )


@record
class ModelSettings(Computation):
    """Sizes of the transformer, shared by policy and critic (two models of these sizes)."""

    width: int = common.static(64, "width of the residual stream", within=COUNT)
    layers: int = common.static(2, "transformer blocks", within=COUNT)
    heads: int = common.static(4, "query heads; width / heads must be even", within=COUNT)
    kv_heads: int = static(4, "key and value heads, a divisor of heads", within=COUNT)
    mlp_width: int = static(256, "width of the hidden layer of each MLP", within=COUNT)
    gated: bool = static(True, "SwiGLU in place of GELU")
    tied: bool = static(False, "the output layer of the policy shares the embedding")
    shape: str = static(
        "none",
        "published model whose sizes replace the other sizes, with --task=random",
        choices=("none", *SHAPES),
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range, or sizes that do not divide evenly."""
        check(self)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                "width", f"must be a multiple of 2 × heads = {2 * self.heads}, got {self.width}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError("kv_heads", f"must divide heads = {self.heads}, got {self.kv_heads}")

    def build(self, vocabulary: int, *, outputs: int = 0) -> Transformer:
        """Builds the model, a policy with `outputs = 0`, a critic with `outputs = 1`."""
        self.validate()
        if self.shape != "none":
            model = architectures.read(
                SHAPES[self.shape], dtype=DTYPES[self.dtype], remat=self.remat
            )
            if vocabulary != model.vocabulary:
                raise ConfigError(
                    "shape",
                    f"{self.shape} has a vocabulary of {model.vocabulary} and the task one of "
                    f"{vocabulary}: choose task=random",
                )
            return model.clone(outputs=outputs, fused_attention=self.fused_attention)
        sizes = dict(vars(self), dtype=DTYPES[self.dtype])
        del sizes["shape"]
        return Transformer(vocabulary=vocabulary, outputs=outputs, **sizes)
