"""Dialogues that are held outside the program, in the steps of `language.conversation_steps`.

The recording of an iteration is put into the collector's state, from which `collect` makes the
batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, check
from jaxrl_po.language.dialogues.problem import Recording, batch_of, problem_of_dialogues
from jaxrl_po.language.networks import make_networks
from jaxrl_po.language.problem import SAMPLER_OF_LEARNER
from jaxrl_po.language.settings import Sampling
from jaxrl_po.language.tasks import Task
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, PyTree, TrainState

RECORDING = "recording"  # entry of the collector's sharded state: `Recording`


def with_recording(state: TrainState, recording: Recording) -> TrainState:
    """The state with what the next `collect` takes its batch from."""
    return state._replace(collector=state.collector.add(sharded={RECORDING: recording}))


def recorded_problem(
    task: Task,
    model: Transformer,
    settings: Sampling,
    *,
    columns: int,
    critic: Transformer | None = None,
    initial: PyTree | None = None,
    target: Target | None = None,
) -> Problem:
    """A problem that reads its dialogues from `with_recording`.

    Args:
      task: whose prompts begin the dialogues.
      model: the policy.
      settings: see `Sampling`.
      columns: N, tokens of the longest dialogue after its prompt.
      critic: see `language.make_problem`.
      initial: likewise.
      target: likewise.

    Returns:
      The `Problem`; its batches are those of `dialogues.make_problem`. Its metrics are too, with
      those of the recording in place of the dialogue's own.

    Raises:
      ConfigError: for an invalid argument, which the message names.
    """
    check(settings)
    # What a reset adds to a prompt is a member's own.
    alone = dataclasses.replace(settings, group_size=1)
    networks = make_networks(
        *(task, model, critic, alone, columns, SAMPLER_OF_LEARNER), initial=initial, target=target
    )

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        del key  # the dialogues were sampled with it
        recording: Recording | None = collector.sharded.get(RECORDING)
        if recording is None:
            raise ConfigError(
                "recording",
                "must be put into the state before each iteration: the dialogues of this "
                "problem run outside the program",
            )
        measures = {
            name: Mean(jnp.sum(each.total), jnp.sum(each.count))
            for name, each in recording.measures.items()
        }
        score = recording.score.reshape(-1, settings.group_size)
        recording = recording._replace(measures=measures)
        return collector.remove(RECORDING), batch_of(networks, params, recording, score)

    return problem_of_dialogues(networks, collect)
