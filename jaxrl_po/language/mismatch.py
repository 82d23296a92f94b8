"""Defines a sampler that differs from the learner by a known amount, as in inference engines."""

from typing import Any

import jax.numpy as jnp

from jaxrl_po.config import NON_NEGATIVE, record, static

DTYPES = {"float32": jnp.dtype("float32"), "bfloat16": jnp.dtype("bfloat16")}
SAME = "same"
AUTO, SAMPLER, LEARNER = OLD_LOG_PROBS = ("auto", "sampler", "learner")


@record
class Sampler:
    """Differences between the policy that samples and the policy that is trained.

    By default there are none.
    """

    dtype: str = static(
        SAME,
        "dtype of the sampler's matrix products; same takes the learner's dtype",
        choices=(SAME, *DTYPES),
    )
    noise: float = static(
        0.0,
        "std of Gaussian noise on each logit of the sampler, drawn anew for each token",
        unit="nats",
        within=NON_NEGATIVE,
    )
    staleness: int = static(
        0,
        "age of the sampler's parameters in iterations",
        unit="iterations",
        within=NON_NEGATIVE,
    )

    def differs(self, model: Any) -> bool:
        """Returns True if the sampler's log-probabilities differ from the `model`'s."""
        return bool(self.noise or self.staleness or self.of(model) is not model)

    def of(self, model: Any) -> Any:
        """Returns the sampling model: the same parameters, computed in the sampler's dtype."""
        # a custom module may lack a dtype
        if self.dtype == SAME or getattr(model, "dtype", None) == DTYPES[self.dtype]:
            return model
        return model.clone(dtype=DTYPES[self.dtype])
