"""Tests that this library's methods give the losses and gradients of TRL, verl and prime-rl on the
same batch.

The numbers of `golden_losses.json` are from the versions named in that file: `peer_losses.py` runs
the code of TRL, verl and prime-rl. Each method is tested completely: advantage, surrogate, weights
and mean, on a policy whose parameters are its tokens' log-probabilities, so that a step of gradient
descent is the gradient.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_po.algorithms import cispo, dapo, distillation, dppo, gmpo, grpo, kl_cov, sapo
from jaxrl_po.config import as_arrays
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem

GOLDEN = json.loads((Path(__file__).parent / "golden_losses.json").read_text())
INPUTS = {name: np.array(x, np.float32) for name, x in GOLDEN["inputs"].items()}
MASK = INPUTS["mask"] > 0
PLAIN = {"dynamic_sampling": "off", "overlong_filtering": False, "soft_overlong": False}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Direct:
    """Distribution that is known only by the log-probabilities of the actions taken."""

    taken: jax.Array

    def log_prob(self, action):
        del action
        return self.taken

    def entropy(self):
        return jnp.zeros_like(self.taken)


def batch(**changes):
    last = MASK & ~np.pad(MASK[:, 1:], ((0, 0), (0, 1)))
    fields = {
        "inputs": jnp.arange(6),
        "action": jnp.zeros(MASK.shape, jnp.int32),
        "log_prob": INPUTS["old"],
        "reward": np.where(last, INPUTS["reward"][:, None], 0.0),
        "value": np.zeros(MASK.shape, np.float32),
        "next_value": np.zeros(MASK.shape, np.float32),
        "terminated": last,
        "truncated": np.zeros(MASK.shape, bool),
        "mask": MASK,
        "score": INPUTS["reward"].reshape(2, 3),
        "metrics": {},
        "columns": {"sampler_log_prob": INPUTS["sampler"]},
    }
    return jax.tree.map(jnp.asarray, Batch(**fields | changes))


PROBLEM = Problem(
    init=lambda key: (ActorCritic(jnp.asarray(INPUTS["now"])), CollectorState({})),
    collect=None,
    apply=lambda params, inputs: (Direct(params.policy[inputs]), jnp.zeros(MASK.shape)),
    rows=lambda samples: samples,
    log_prob_matches_sampler=False,
)


def loss_and_gradient(module, config, given):
    learner = module.make(as_arrays(config), PROBLEM, optax.sgd(1.0))
    state = learner.init(jax.random.key(0))
    if state.reference_params is not None:
        state = state._replace(reference_params=jnp.asarray(INPUTS["reference"]))
    after, metrics = jax.jit(learner.update)(state, given)
    loss = metrics["policy_loss"].value()
    if "reference_kl" in metrics:
        loss += config.kl_coefficient * metrics["reference_kl"].value()
    return float(loss), np.asarray(state.params.policy - after.params.policy)


BOUNDED = {"epsilon_low": 0.2, "epsilon_high": 0.2}
TOKENS = functools.partial(dapo.Config, **PLAIN, clip_higher=False, epsilon_low=0.2)
CASES = {
    "trl sapo": (sapo, sapo.Config()),
    "verl sapo": (sapo, sapo.Config()),
    "trl gmpo": (gmpo, gmpo.Config(epsilon_low=0.4, epsilon_high=0.3)),
    "verl gmpo": (gmpo, gmpo.Config(epsilon_low=0.4, epsilon_high=0.3)),
    # In verl, epsilon_high is the upper cap, and ratios are not clipped from below: the same as
    # this library's defaults.
    "trl cispo": (cispo, cispo.Config()),
    "verl cispo": (cispo, cispo.Config(epsilon_low=0.2, epsilon_high=0.28)),
    "verl dppo": (dppo, dppo.Config(delta_low=0.1, delta_high=0.2)),
    "verl kl_cov": (kl_cov, kl_cov.Config(share=0.2, penalty=0.7)),
    "verl truncated": (dapo, TOKENS(correction="truncate", correction_high=2.0)),
    "verl masked": (dapo, TOKENS(correction="mask", correction_high=2.0)),
    "trl off-policy mask": (
        grpo,
        grpo.Config(use_reference=False, mask_off_policy=True, off_policy_kl=0.1),
    ),
    "trl reweighted kl": (grpo, grpo.Config(kl_coefficient=0.3, reweight_kl=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_peers(name):
    module, config = CASES[name]
    given = batch(log_prob=INPUTS["near_old"]) if module is kl_cov else batch()
    loss, gradient = loss_and_gradient(module, config, given)
    want = GOLDEN["cases"][name]
    np.testing.assert_allclose(loss, want["loss"], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, np.array(want["gradient"]), rtol=2e-5, atol=2e-6)
    assert (gradient[~MASK] == 0.0).all()


def test_distillation_is_prime_rls_without_its_penalty():
    """prime-rl adds `1e-3 (log π/μ)²`, whose gradient the test subtracts."""
    given = batch(
        columns={"sampler_log_prob": INPUTS["near_sampler"], "teacher_log_prob": INPUTS["teacher"]}
    )
    loss, gradient = loss_and_gradient(distillation, distillation.Config(), given)
    want, tokens = GOLDEN["cases"]["prime-rl distillation"], MASK.sum()
    distance = np.where(MASK, INPUTS["now"] - INPUTS["near_sampler"], 0.0)
    penalty = 1e-3 * np.square(distance).sum() / tokens
    np.testing.assert_allclose(loss, want["loss"] - penalty, rtol=2e-5)
    np.testing.assert_allclose(
        gradient, np.array(want["gradient"]) - 2e-3 * distance / tokens, rtol=2e-5, atol=2e-6
    )


def test_the_batch_reaches_both_sides_of_every_bound():
    """Otherwise the comparison would not detect a wrong bound."""
    r, rho = (
        np.exp((INPUTS[a] - INPUTS[b])[MASK]) for a, b in (("now", "old"), ("old", "sampler"))
    )
    assert r.max() > 20 > 5 > np.sort(r)[-2] > 1.28
    assert r.min() < 0.8
    assert rho.max() > 2.0
    assert rho.min() < 0.5
    change = (np.exp(INPUTS["now"]) - np.exp(INPUTS["sampler"]))[MASK]
    assert change.max() > 0.2
    assert change.min() < -0.1
