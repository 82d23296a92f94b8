"""Defines a categorical and a Gaussian policy that are linear in the observation, and their mean
KL."""

import jax.numpy as jnp
import numpy as np

from jaxrl_po.distributions import Categorical, DiagonalGaussian

rng = np.random.default_rng(0)
OBSERVATIONS = jnp.asarray(rng.normal(size=(16, 3)), jnp.float32)
PARAMS = {
    "w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
    "b": jnp.asarray(rng.normal(size=(4,)), jnp.float32),
}
VECTOR = {
    "w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
    "b": jnp.asarray(rng.normal(size=(4,)), jnp.float32),
}


def categorical(params, observations=OBSERVATIONS):
    return Categorical(
        observations @ params["w"] + jnp.broadcast_to(params["b"], (len(observations), 4))
    )


def gaussian(params, observations=OBSERVATIONS):
    mean = observations @ params["w"]
    return DiagonalGaussian(mean, jnp.broadcast_to(0.1 * params["b"], mean.shape))


def mean_kl(policy):
    old = policy(PARAMS)
    return lambda params: jnp.mean(old.kl(policy(params)))
