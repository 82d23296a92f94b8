"""Config fields of methods without a critic, as mix-ins; a method inherits those it uses."""

from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import corrections
from jaxrl_po.algorithms.surrogates import CLIP
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, Interval, Number, common, number, static
from jaxrl_po.optimizers import Optimization

ABOVE_ONE = Interval(1.0, open_low=True)
STD, CENTRED, BATCH, MEAN = SCALES = ("std", "none", "batch", "mean")


@config_lib.record
class Steps(Optimization):
    """Number of gradient steps on a batch, and their minibatches."""

    learning_rate: Number = common.number(1e-3, "step size", within=POSITIVE)
    max_grad_norm: Number = number(1.0, "clip of the gradient's global norm", within=POSITIVE)
    # The gradient of a mean over many tokens is small: an ε of 1e-5 would shorten the first steps.
    optimizer_epsilon: Number = number(
        1e-8, "ε of the optimizer, outside the square root", within=POSITIVE
    )
    num_epochs: int = common.static(1, "passes over each batch", within=COUNT)
    num_minibatches: int = common.static(1, "gradient steps of one pass", within=COUNT)
    num_microbatches: int = common.static(
        1, "parts of a minibatch, accumulated to bound memory", within=COUNT
    )
    axis_name: str | None = static(None, "device axis over which rows are sharded")

    @property
    def num_parts(self) -> int:
        """Number of microbatches in a complete batch."""
        return self.num_minibatches * self.num_microbatches


@config_lib.record
class GradientSteps(corrections.Corrections, Steps):
    """Fields of every method without a critic."""

    entropy_coefficient: Number = common.number(
        0.0, "weight of the entropy bonus", unit="per nat", within=NON_NEGATIVE
    )


@config_lib.record
class Reference(GradientSteps):
    """KL penalty to a frozen reference policy."""

    use_reference: bool = common.static(
        True, "KL penalty to a reference policy, at first the initial one"
    )
    kl_coefficient: Number = common.number(
        0.04,
        "β, weight of KL(policy ‖ reference)",
        within=NON_NEGATIVE,
        when=("use_reference", True),
    )
    reweight_kl: bool = static(
        False,
        "multiply the KL penalty in the loss by the ratio π / π_old, so that its expected "
        "gradient is the gradient of KL(policy ‖ reference) (DeepSeek-V3.2)",
        when=("use_reference", True),
    )
    reset_iterations: int = static(
        0,
        "at every n-th iteration the policy becomes the reference and the optimizer state is reset "
        "(ProRL); 0 never",
        unit="iterations",
        within=NON_NEGATIVE,
        when=("use_reference", True),
    )


@config_lib.record
class OptionalReference(Reference):
    """KL penalty to a frozen reference policy, off by default."""

    use_reference: bool = common.static(
        False, "KL penalty to a reference policy, at first the initial one"
    )


@config_lib.record
class Clip(GradientSteps):
    """Clip of the probability ratio."""

    epsilon_low: Number = common.number(
        0.2, "the ratio is clipped from below at 1 − epsilon_low", within=CLIP
    )
    epsilon_high: Number = common.number(
        0.2, "the ratio is clipped from above at 1 + epsilon_high", within=CLIP
    )
    dual_clip: bool = static(
        False, "for negative advantages, also clip the ratio from above, at dual_clip_ratio"
    )
    dual_clip_ratio: Number = number(
        3.0, "largest ratio for a negative advantage", within=ABOVE_ONE, when=("dual_clip", True)
    )

    @property
    def upper(self) -> Number:
        """Bound ε_high in effect: the ratio is clipped from above at 1 + ε_high."""
        return self.epsilon_high

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        super().validate()
        config_lib.require_order(self.epsilon_low, self.upper, "epsilon_low", "epsilon_high")


@config_lib.record
class GroupScale(GradientSteps):
    """Divisor that normalises a group's advantages."""

    scale: str = static(
        STD,
        "divisor of R − mean: the group's std, none, the std of the whole batch (Lite PPO), or the "
        "group's mean (MaxRL), for outcomes of at least 0",
        choices=SCALES,
    )
    ddof: int = static(0, "the std divides by G − ddof", choices=(0, 1), when=("scale", STD))
    std_epsilon: Number = number(
        1e-6,
        "constant that is added to the std",
        unit="reward units",
        within=NON_NEGATIVE,
        when=("scale", STD, BATCH),
    )
