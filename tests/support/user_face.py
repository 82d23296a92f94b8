"""Checks a user's program by `mypy --strict`: `make check`. Each line with an ignored error must
have an error."""

from collections.abc import Mapping

import gymnax
import jax
import jax.numpy as jnp

import jaxrl_po
from jaxrl_po import advantages, control, language, losses, run
from jaxrl_po.algorithms import group_policy, grpo, ppo
from jaxrl_po.types import Learner, Metrics, Problem, Samples, TrainState


def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes a user's loss."""
    elements = losses.surrogate(log_prob, samples.log_prob, samples.advantage)
    return elements + 0.5 * jnp.square(log_prob - samples.log_prob), {}


def learners() -> list[Learner]:
    """Returns the learners of the README, each with the arguments of its state."""
    env = gymnax.make("CartPole-v1")[0]
    games: Problem = control.make_problem(env, num_envs=16, num_steps=512)
    task = language.tasks.addition(2)
    model = language.ModelSettings(width=64, layers=2).build(task.tokenizer.size)
    words: Problem = language.make_problem(task, model, num_prompts=64, group_size=4)
    parts = group_policy.outcome_advantage(advantages.leave_one_out)
    return [
        ppo.make(ppo.Config(learning_rate=1e-3), games, surrogate=surrogate),
        jaxrl_po.grpo.make(grpo.Config(), words),
        group_policy.make(
            group_policy.GradientSteps(num_epochs=2),
            words,
            group_advantage=parts,
            surrogate=surrogate,
            aggregate=losses.token_mean,
        ),
        ppo.make(grpo.Config(), games),  # type: ignore[arg-type]
        ppo.make(ppo.Config(learning_rat=1e-3), games),  # type: ignore[call-arg]
        control.make_problem(env, num_envs="16", num_steps=512),  # type: ignore[arg-type, list-item]
    ]


def train(learner: Learner, key: jax.Array) -> tuple[TrainState, Metrics]:
    """Trains in a loop that a user writes."""

    def step(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
        return learner.step(state)

    state, metrics = jax.lax.scan(step, learner.init(key), length=20)
    metrics["episode_return"].metrics()  # type: ignore[attr-defined]
    return state, metrics


def runs(learner: Learner) -> Mapping[str, object]:
    """Trains in the same way as the commands."""
    experiment = run.Experiment(env="Acrobot-v1", algorithm="trpo", out="runs/again")
    trained: run.Trained = run.train(experiment)
    run.load(7)  # type: ignore[call-overload]
    run.trian(experiment)  # type: ignore[attr-defined]
    jaxrl_po.pppo.Config()  # type: ignore[attr-defined]
    policy = run.load(trained.folder or "runs/again")
    assert isinstance(policy, run.ControlPolicy)
    policy.act(jnp.zeros(6))
    run.train(learner, 20, exporters=[run.TensorBoard(), run.WeightsAndBiases("mine")])
    run.train(experiment, exporters=[object()])  # type: ignore[list-item]
    return run.train(learner, iterations=20, seeds=4, out="runs/mine", title="mine").rows[-1]
