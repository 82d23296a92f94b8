"""Defines Flax modules as users write them: constants beside parameters, and modules that are
refused."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_po.distributions import Categorical

SIZE = 4  # number of features in CartPole's observation


class Scaled(nn.Module):
    """Module that multiplies observation features by a vector, which is drawn or passed as an
    argument."""

    baked: tuple[float, ...] | None = None

    @nn.compact
    def __call__(self, x):
        def draw():
            return 1.0 + jax.random.uniform(self.make_rng("params"), (SIZE,))

        scale = self.baked or self.variable("constants", "scale", draw).value
        scaled = x * jnp.broadcast_to(jnp.asarray(scale), x.shape)
        self.sow("intermediates", "scaled", scaled)
        return nn.tanh(nn.Dense(5)(scaled))


class Policy(nn.Module):
    baked: tuple[float, ...] | None = None

    @nn.compact
    def __call__(self, x):
        return Categorical(nn.Dense(2)(Scaled(self.baked)(x)))


class Critic(nn.Module):
    baked: tuple[float, ...] | None = None

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(Scaled(self.baked)(x))[..., 0]


class Both(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Policy()(x), Critic()(x)


class Bigrams(nn.Module):
    """Module whose outputs depend only on the last token, plus a constant for each output."""

    vocabulary: int
    outputs: int = 0
    layer: nn.Module | None = None

    @nn.compact
    def __call__(self, tokens, pad, cache=None, start=0, *, last=0):
        outputs = self.outputs or self.vocabulary
        x = nn.Embed(self.vocabulary, outputs)(tokens[:, -last:])
        if self.layer is not None:
            x = self.layer(x)

        def draw():
            return jax.random.normal(self.make_rng("params"), (self.vocabulary, outputs))

        return x + self.variable("constants", "bias", draw).value[tokens[:, -last:]], cache

    def empty_cache(self, batch, length):
        return jnp.zeros((batch, 1))


class Counting(nn.Module):
    """Module that counts how often it is applied."""

    @nn.compact
    def __call__(self, x):
        count = self.variable("state", "count", lambda: jnp.int32(0))
        count.value += 1
        return x


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + jax.random.normal(self.make_rng("noise"), x.shape)


class Through(nn.Module):
    """Module with a layer that processes the observation before the head."""

    layer: nn.Module
    head: nn.Module

    def __call__(self, x):
        return self.head(self.layer(x))
