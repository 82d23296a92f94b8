"""Implements V-trace (Espeholt et al. 2018, arXiv:1802.01561, eq. 1) in PPO, for older samples."""

import jax
import jax.numpy as jnp

from jaxrl_po import language
from jaxrl_po.algorithms import ppo
from jaxrl_po.divergences import ratio


def v_trace(trajectory, gamma=1.0, max_rho=1.0, max_c=1.0):
    """Computes `v_t = V_t + ρ_t δ_t + γ c_t (v_{t+1} − V_{t+1})`, the critic's target.

    The advantage is `ρ_t (r_t + γ v_{t+1} − V_t)`. The weights ρ and c are π_old / μ, cut at
    `max_rho` and `max_c`; PPO's own ratio is π / π_old.
    """
    weight = ratio(trajectory.log_prob, trajectory.sampler_log_prob)
    rho, c = jnp.minimum(weight, max_rho), jnp.minimum(weight, max_c)
    ended = trajectory.terminated | trajectory.truncated
    next_value = jnp.where(trajectory.terminated, 0.0, trajectory.next_value)
    delta = rho * (trajectory.reward + gamma * next_value - trajectory.value)

    def step(later, x):
        delta, c, ended = x
        later = jnp.where(ended, 0.0, later)  # v_{t+1} − V_{t+1}
        return delta + gamma * c * later, (delta + gamma * c * later, later)

    _, (change, later) = jax.lax.scan(step, 0.0, (delta, c, ended), reverse=True)
    return delta + rho * gamma * later, trajectory.value + change


def make():
    """Builds PPO on one-digit sums, sampled by the policy of two iterations ago."""
    task = language.tasks.addition(1)
    sizes = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=2, mlp_width=16)
    problem = language.make_problem(
        task,
        sizes.build(task.tokenizer.size),
        num_prompts=16,
        group_size=1,
        max_new_tokens=8,
        critic=sizes.build(task.tokenizer.size, outputs=1),
        sampler=language.Sampler(staleness=2),
    )
    return ppo.make(ppo.Config(num_epochs=1, num_minibatches=2), problem, advantage=v_trace)


if __name__ == "__main__":
    learner = make()
    state = jax.jit(lambda key: learner.init(key))(jax.random.key(0))
    state, metrics = jax.lax.scan(lambda state, _: learner.step(state), state, length=4)
    print(metrics["sampler_kl"].metric())  # KL(μ ‖ π_old): not 0, because the sampler is older
