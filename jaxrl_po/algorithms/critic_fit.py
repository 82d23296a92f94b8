"""Fits a critic separately from the policy, for REINFORCE, NPG and TRPO."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from jaxrl_po import config as config_lib
from jaxrl_po import learner, losses, masked, optimizers, updates
from jaxrl_po.algorithms.actor_critic import Estimation
from jaxrl_po.config import COUNT, POSITIVE, ConfigError, Number, common, static
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Learner, Metrics, Problem, PyTree, Samples, TrainState

Improved = tuple[PyTree, PyTree, Metrics]
"""Parameters and optimizer state of the policy after its update, and metrics."""
ImprovePolicy = Callable[[TrainState, Samples, jax.Array], Improved]


@config_lib.record
class CriticFit(Estimation):
    """Settings of a critic fitted separately from the policy, by Adam on ½(v − target)².

    The settings are fields of REINFORCE, NPG and TRPO.
    """

    value_learning_rate: Number = common.number(
        1e-3, "Adam's step size for the critic", within=POSITIVE
    )
    value_epochs: int = static(10, "passes of the critic over each batch", within=COUNT)
    value_minibatches: int = static(16, "gradient steps of one pass of the critic", within=COUNT)
    num_microbatches: int = common.static(
        1, "parts of the batch, accumulated to bound memory", within=COUNT
    )

    @property
    def num_parts(self) -> int:
        """Number of parts of a batch, so that a part needs the memory of one microbatch."""
        return self.num_microbatches


def make_with_fitted_critic(
    config: CriticFit,
    problem: Problem,
    *,
    estimate: learner.Estimate,
    improve_policy: ImprovePolicy,
    plain: Problem | None = None,
    init_policy_optimizer: Callable[[PyTree], PyTree] = lambda params: None,
    num_parts: int = 1,
) -> Learner:
    """Builds a learner that updates the policy by `improve_policy` and the critic by Adam.

    Args:
      config: hyperparameters, see `CriticFit`.
      problem: source of samples; the problem's critic is fitted if it has one.
      estimate: `(state, batch) -> samples`, see `learner.make`.
      improve_policy: `(state, samples, key) -> (policy, opt_state, metrics)`: parameters and
        optimizer state of the policy after its update; consumes `key`.
      plain: problem that accepts rows in any order, for the critic's fit; None stands for
        `problem`.
      init_policy_optimizer: `policy parameters -> optimizer state`; None if the policy does not
        have one.
      num_parts: number of parts of a batch, see `learner.make`.

    Returns:
      `Learner` whose `opt_state` is an `ActorCritic`. The learner's metrics are the policy's
      metrics, `value_loss`, and `skipped` over the steps of policy and critic.
    """
    optimizer = optimizers.adam(config.value_learning_rate, max_grad_norm=jnp.inf)

    def fit(
        params: ActorCritic, opt_state: PyTree, rows: Samples, key: jax.Array
    ) -> tuple[PyTree, PyTree, Metrics]:
        def loss(value_params: PyTree, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
            _, value = (plain or problem).apply(params._replace(value=value_params), samples.inputs)
            mean = losses.token_mean(losses.squared_value(value, samples.target), samples.mask)
            return (mean,), {"value_loss": mean}

        update = updates.gradient_update(
            loss,
            optimizer,
            num_epochs=config.value_epochs,
            num_minibatches=config.value_minibatches,
            slots=rows.mask[0].size,
            target=problem.target,
            axis_name=config.axis_name,
        )
        value, opt_state, metrics = update(params.value, opt_state, rows, key)
        return value, opt_state, {name: metrics[name] for name in ("value_loss", "skipped")}

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        rows, params = problem.rows(samples), state.params
        refuse_shared_parameters(problem, params, rows)
        policy_key, value_key = jax.random.split(key)
        fitted: Metrics = {}
        # Both `None` and an empty tree mean that there is no critic. The order of the two updates
        # does not matter, since the critic does not read the policy's parameters.
        if jax.tree.leaves(params.value):
            value, value_state, fitted = fit(params, state.opt_state.value, rows, value_key)
            state = state._replace(
                params=params._replace(value=value),
                opt_state=state.opt_state._replace(value=value_state),
            )
        policy, policy_state, metrics = improve_policy(state, rows, policy_key)
        if fitted:
            metrics = {**metrics, "skipped": metrics["skipped"] + fitted.pop("skipped")}
        metrics = masked.merge(fitted, metrics)
        return state._replace(
            params=state.params._replace(policy=policy),
            opt_state=state.opt_state._replace(policy=policy_state),
        ), metrics

    def init_optimizer(params: ActorCritic) -> ActorCritic:
        value = optimizer.init(params.value) if jax.tree.leaves(params.value) else None
        return ActorCritic(init_policy_optimizer(params.policy), value)

    return learner.make(
        problem,
        estimate=estimate,
        improve=improve,
        init_optimizer=init_optimizer,
        num_parts=num_parts,
        axis_name=config.axis_name,
    )


def refuse_shared_parameters(problem: Problem, params: ActorCritic, samples: Samples) -> None:
    """Rejects a critic that reads the policy's parameters; the critic is traced, but not computed.

    Raises:
      ConfigError: the critic's value depends on `params.policy`.
    """
    program = jax.make_jaxpr(
        lambda policy: problem.apply(params._replace(policy=policy), samples.inputs)[1]
    )(params.policy)
    # The value depends on those inputs that remain after dead-code elimination, which also looks
    # inside jitted functions.
    _, is_read = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    if any(is_read):
        raise ConfigError(
            "shared_torso",
            "must be off, and a module of your own must compute the value without params.policy: "
            "fitting the critic would move the policy outside the trust region",
        )
