"""Builds and runs a learner that compiles in a second."""

import jax
import jax.numpy as jnp
import numpy as np
from probes import one_piece

from jaxrl_po.masked import Mean
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.job import (
    Display,
    Evaluation,
    Host,
    Layout,
    Length,
    Output,
    Patience,
    TrainJob,
)
from jaxrl_po.types import ActorCritic, CollectorState, TrainState

SEEDS = 3


def start_of(key, size):
    """Returns the state before a random walk of `size` numbers."""
    return TrainState(
        ActorCritic(jax.random.normal(key, (size,))),
        None,
        None,
        jnp.float32(0.0),
        CollectorState({}),
        jax.random.fold_in(key, 1),
        jnp.int32(0),
    )


def toy(poison=None):
    """Builds a random walk whose metrics show its steps; `poison(step, seed)` marks skipped
    updates."""

    def step(state, seed):
        key, noise_key = jax.random.split(state.key)
        params = ActorCritic(0.9 * state.params.policy + jax.random.normal(noise_key, (4,)))
        skipped = (
            jnp.float32(0.0) if poison is None else poison(state.step, seed).astype(jnp.float32)
        )
        metrics = {
            "size": Mean(jnp.square(params.policy).sum(), jnp.float32(4.0)),
            # The line's own field of this name takes precedence over the metric.
            "step": Mean(-jnp.ones(()), jnp.float32(1.0)),
            "skipped": Mean(2.0 * skipped, jnp.float32(2.0)),
        }
        return state._replace(params=params, key=key, step=state.step + 1), metrics

    return one_piece(
        jax.vmap(lambda key: start_of(key, 4)),
        lambda state: jax.vmap(step)(state, jnp.arange(SEEDS)),
    )


def _walk(state):
    key, noise_key = jax.random.split(state.key)
    policy = 0.9 * state.params.policy + jax.random.normal(noise_key, (4,))
    state = state._replace(
        params=state.params._replace(policy=policy), key=key, step=state.step + 1
    )
    return state, {"size": Mean(jnp.square(policy).sum(), jnp.float32(4.0))}


WALK = one_piece(lambda key: start_of(key, 4), _walk)  # fields of one seed


def greedy(state):
    return {"greedy_return": state.params.policy.mean(axis=1)}


def greedy_of_seed(params, collector, key):
    return {"greedy_return": params.policy.mean()}


RECORDS = {
    "length": Length,
    "patience": Patience,
    "evaluation": Evaluation,
    "host": Host,
    "display": Display,
}


def train_job(learner, keys, **flat):
    """Builds a job of a stacked learner; `flat` are the job's fields, and fields of its records by
    name."""
    nested = {
        name: record(**{field: flat.pop(field) for field in record._fields if field in flat})
        for name, record in RECORDS.items()
    }
    defaults = {
        "given": None,
        "warm": None,
        "cheap_init": False,
        "layout": Layout(Placement(len(jax.tree.leaves(keys)[0]), 1, 1)),
        "rebuild": None,
        "digests": {},
        "output": Output({}),
    }
    return TrainJob(learner=learner, keys=keys, **(defaults | nested | flat))


def job(**changes):
    defaults = {
        "learner": toy(),
        "keys": jax.random.split(jax.random.key(0), SEEDS),
        "iterations": 23,
        "steps_per_iteration": 10,
        "log_every": 5,
        "eval_every": 2,
        "checkpoint_every": 1,
        "measure": greedy_of_seed,
        "score": "greedy_return",
    }
    return train_job(**(defaults | changes))


class Silent:
    """Reporter that only records its calls."""

    def __init__(self, hook=lambda row: None):
        self.reported, self.phases, self.rows, self.seconds_left = [], [], [], []
        self.hook = hook

    def report(self, line):
        self.reported.append(line)

    def phase(self, name):
        self.phases.append(name)

    def update(self, row, seconds_left):
        self.rows.append(row)
        self.seconds_left.append(seconds_left)
        self.hook(row)


def run(path, reporter=None, resume=False, **changes):
    path.mkdir(exist_ok=True)
    return runner.run(job(**changes), path, reporter or Silent(), resume=resume)


def bits(state):
    words = state._replace(key=jax.random.key_data(state.key))
    return jax.tree.map(lambda x: np.asarray(x).tobytes(), words)
