"""Cells of the lecture's comparison table, each measured on a finished run of `language.py`."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import ablation
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax
from comparison import Result

from jaxrl_po import language as language_lib
from jaxrl_po.algorithms import dapo, npg
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import earlier, language, models, registry
from jaxrl_po.run.experiment.language_config import LanguageConfig
from jaxrl_po.run.store import metrics, statistics
from jaxrl_po.types import ActorCritic, Batch, CollectorState, FastPaths, Problem, PyTree

Array = npt.NDArray[np.float64]


class Shifted(NamedTuple):
    """Policy whose log-probabilities are shifted token by token.

    The derivative with respect to a token's shift is the derivative with respect to log π(o_t).
    """

    base: Any
    shift: jax.Array

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Returns the shifted log-probabilities `[B, T]`, nats."""
        return self.base.log_prob(action) + self.shift

    def entropy(self) -> jax.Array:
        """Returns the entropy `[B, T]` of the unshifted policy."""
        return self.base.entropy()

    def kl(self, other: "Shifted") -> jax.Array:
        """Returns the KL `[B, T]` between the unshifted policies."""
        return self.base.kl(other.base)


def shifted(problem: Problem, groups: tuple[int, int], budget: int) -> Problem:
    """Builds the problem with one shift per token among the parameters, and with known advantages.

    Every other member of a group is right (every other row, if groups have one member) and the
    critic predicts 0, so that all tokens of right rows share one advantage, and all tokens of wrong
    rows share another: differences within right rows, or within wrong rows, are weights that the
    loss gives to tokens.
    """
    rows, size = groups[0] * groups[1], max(groups[1], 2)

    def inside(params: ActorCritic) -> ActorCritic:
        return params._replace(policy=params.policy[0])

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        params, collector = problem.init(key)
        return params._replace(policy=(params.policy, jnp.zeros((rows, budget)))), collector

    def apply(params: ActorCritic, inputs: PyTree) -> tuple[Shifted, jax.Array]:
        of_problem, row = inputs
        distribution, value = problem.apply(inside(params), of_problem)
        return Shifted(distribution, params.policy[1][row]), value

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        collector, batch = problem.collect(inside(params), collector, key)
        right = outcomes(rows, size)
        nothing = jnp.zeros_like(batch.value)
        last = (batch.terminated | batch.truncated) & batch.mask
        return collector, batch._replace(
            inputs=(batch.inputs, jnp.arange(rows)),
            reward=jnp.where(last, right[:, None], 0.0),
            value=nothing,
            next_value=nothing,
            terminated=last,
            truncated=jnp.zeros_like(batch.mask),
            score=right.reshape(groups),
        )

    return problem._replace(init=init, apply=apply, collect=collect, fast_paths=FastPaths())


def outcomes(rows: int, size: int) -> jax.Array:
    """Returns outcomes 0, 1, 0, 1, … within each group."""
    return (jnp.arange(rows) % size % 2).astype(jnp.float32)


def one_step(config: Any) -> Any:
    """Returns the config of the same loss for a single plain step.

    Settings that affect a step's length, but not its direction, have their defaults.
    """
    plain = {
        "num_epochs": 1,
        "num_minibatches": 1,
        "num_microbatches": 1,
        "warm_up_iterations": 0,
        "decay_iterations": 0,
        "fisher_stride": 1,
        "value_epochs": 1,
        "value_minibatches": 1,
    }
    own = ("learning_rate", "max_grad_norm", "optimizer_epsilon")
    changes: dict[str, Any] = {name: value for name, value in plain.items() if name in vars(config)}
    changes |= {name: vars(type(config)())[name] for name in own if name in vars(config)}
    if isinstance(config, npg.Config):
        # With so large a damping the natural step points along the gradient.
        changes |= {"damping": 1e6, "cg_iterations": 1}
    if isinstance(config, dapo.Config):
        # A penalty on length is not a token weight.
        changes |= {"soft_overlong": False, "overlong_cache": 0, "overlong_factor": 1.0}
    return dataclasses.replace(config, **changes)


def token_weights(
    algorithm: Any, config: Any, problem: Problem, key: jax.Array
) -> tuple[Array, Array, Array]:
    """Computes the weight of one token in the loss of an algorithm, by differentiating the loss.

    Args:
      algorithm: module with `make`.
      config: config of the algorithm.
      problem: language problem with a policy whose responses differ in length.
      key: PRNG key, consumed.

    Returns:
      For each response, `[B]`: length in tokens, outcome, and the mean of |d loss / d log π| over
      the response's tokens, up to a common factor.
    """
    batch = jax.eval_shape(lambda: problem.collect(*problem.init(key), key)[1])
    instance = shifted(problem, batch.score.shape, batch.mask.shape[1])
    optimizer = () if isinstance(config, npg.Config) else (optax.sgd(1.0),)
    learner = algorithm.make(one_step(config), instance, *optimizer)
    state, _ = jax.jit(lambda key: learner.step(learner.init(key)))(key)
    weight = np.abs(np.asarray(state.params.policy[1], np.float64))
    length = np.count_nonzero(weight, axis=1).astype(np.float64)  # every advantage is non-zero
    outcome = np.asarray(outcomes(len(weight), max(batch.score.shape[1], 2)), np.float64)
    return length, outcome, weight.sum(axis=1) / np.maximum(length, 1.0)


def length_slope(length: Array, outcome: Array, weight: Array) -> float:
    """Fits the slope of log(weight of a token) over log(length of its response), by least squares.

    Each outcome has its own intercept. A slope of −1 means that a token of a response twice as long
    weighs half; a slope of 0, that all tokens weigh the same.

    Example:
      >>> length = np.array([1.0, 2.0, 4.0, 2.0])
      >>> round(length_slope(length, np.array([0.0, 0.0, 1.0, 1.0]), 3.0 / length), 6)
      -1.0
    """
    columns = np.stack([np.log(length), outcome == 0.0, outcome == 1.0], axis=1).astype(np.float64)
    return float(np.linalg.lstsq(columns, np.log(weight), rcond=None)[0][0])


def size_of(tree: PyTree) -> int:
    """Counts the bytes of all arrays (or shapes) in a tree; keys do not count."""
    leaves = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def measure(result: Result, out: Path) -> dict[str, Any]:
    """Measures all cells of the lecture's table on one run.

    Args:
      result: result of the run.
      out: folder that contains the run's folder.
    """
    settings = earlier.read_config(language, "out", str(out / result.name))
    options, problem, config = settings.run, settings.problem, settings.method
    job = language.build(settings, Placement(1, 1, 1))
    state = jax.eval_shape(job.learner.init, job.start)
    models = {
        "policy": state.params.policy,
        "critic": state.params.value,
        "reference": state.reference_params,
        "frozen": state.collector.replicated,
    }
    held = {name: size_of(tree) for name, tree in models.items() if jax.tree.leaves(tree)}
    placement = parallel.choose(
        options.devices, num_seeds=options.seeds, num_rows=problem.num_prompts, mesh=options.mesh
    )
    seeds = placement.num_seeds // placement.seed_devices  # number of seeds on each device
    first, last, iterations = (
        result.rows[0],
        result.rows[-1],
        np.diff([row["iteration"] for row in result.rows]),
    )
    generated, useful = (
        ablation.generated(result)[:, -1].mean(),
        useful_steps(result, config, iterations),
    )
    _, kl = metrics.curve(result.rows, "kl")
    return {
        "models": held,
        "optimizer bytes": size_of(state.opt_state),
        "peak bytes": None
        if first["memory/peak_bytes"] is None
        else first["memory/peak_bytes"] / seeds,
        "completions per iteration": problem.num_prompts * problem.group_size,
        "samples per prompt": problem.group_size
        * (line_mean(result, "generation_batches", None) or 1.0),
        "dead groups": line_mean(result, "dead_groups", None),
        "tokens per useful step": generated / useful if useful else None,
        "length slope": length_slope(
            *token_weights(
                registry.METHODS[options.algorithm],
                config,
                untrained(settings),
                jax.random.key(options.seed),
            )
        ),
        "seconds per iteration": sum(row.get("time/seconds", 0.0) for row in result.rows)
        / last["iteration"],
        "tokens generated": generated,
        "kl": [float(np.nanmean(kl)), float(np.nanmax(kl))],
        "warm start": np.mean(first["greedy_accuracy"]),
        "final accuracy": float(statistics.interquartile_mean(last["greedy_accuracy"])),
    }


def untrained(config: LanguageConfig) -> Problem:
    """Builds the run's task with an untrained policy, whose responses have all lengths."""
    task = models.make_task(config, None)
    assert isinstance(task, language_lib.Task)
    assert isinstance(config.model, language_lib.ModelSettings)
    policy, critic = (
        config.model.build(task.tokenizer.size, outputs=outputs) for outputs in (0, 1)
    )
    size = config.problem.group_size
    return language_lib.make_problem(
        task, policy, critic=critic, num_prompts=max(64 // size, 1), group_size=size
    )


def line_mean(result: Result, metric: str, default: float | None) -> float | None:
    """Averages a metric over lines and seeds; returns `default` if no line has the metric."""
    _, values = metrics.curve(result.rows, metric)
    return float(np.nanmean(values)) if values.size else default


def known(values: Any) -> Array:
    """Returns the numbers of a metric in a line, `[S]`, with 0 for missing numbers."""
    return np.nan_to_num(np.asarray(values, np.float64))


def useful_steps(result: Result, config: Any, iterations: Array) -> float:
    """Counts steps that moved the parameters, weighted by the share of tokens with an advantage.

    The count is averaged over seeds. A seed without a number in a line (no step was tried, no token
    trained) adds nothing.
    """
    steps = vars(config).get("num_epochs", 1) * vars(config).get("num_minibatches", 1)
    rows = result.rows[1:]
    moved = "updates" if "updates" in rows[0] else "accepted"
    taken = [known(row[moved]).mean() * known(row.get("signal", [1.0])).mean() for row in rows]
    return float(np.sum(np.array(taken) * iterations) * steps)
