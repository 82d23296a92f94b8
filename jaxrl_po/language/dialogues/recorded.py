"""Builds problems whose dialogues run outside the program, by steps of `conversation_steps`.

The caller puts the recording of an iteration into the collector's state, from which `collect`
builds the batch.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, check
from jaxrl_po.language.dialogues.problem import (
    DialogueRecording,
    dialogue_batch,
    problem_of_dialogues,
)
from jaxrl_po.language.networks import make_networks
from jaxrl_po.language.problem import SAMPLER_OF_LEARNER
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.language.tasks import Task
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, PyTree, TrainState

RECORDING = "recording"  # name of the `DialogueRecording` in the collector's sharded state


def with_dialogues(state: TrainState, recording: DialogueRecording) -> TrainState:
    """Returns the state with the recording from which the next `collect` builds its batch."""
    return state._replace(collector=state.collector.add(sharded={RECORDING: recording}))


def recorded_problem(
    task: Task,
    model: Transformer,
    settings: SamplingSettings,
    *,
    columns: int,
    critic: Transformer | None = None,
    initial: PyTree | None = None,
    target: Target | None = None,
) -> Problem:
    """Builds a problem that takes its dialogues from the state that `with_dialogues` returns.

    Args:
      task: task whose prompts begin the dialogues.
      model: transformer of the policy.
      settings: sizes of the problem and its sampling, see `SamplingSettings`.
      columns: number N of tokens in the longest dialogue after its prompt.
      critic: transformer with one output, or None for a problem without critic.
      initial: initial parameters of the policy, see `language.make_problem`.
      target: hardware that the program is compiled for; None for `backend.here()`.

    Returns:
      `Problem` with the same batches and metrics as `dialogues.make_problem`, except that the
      recording's measures replace the dialogue's own metrics.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.
    """
    check(settings)
    # Members of a group may have different prompts: a reset can add text to each member's prompt.
    alone = dataclasses.replace(settings, group_size=1)
    networks = make_networks(
        *(task, model, critic, alone, columns, SAMPLER_OF_LEARNER), initial=initial, target=target
    )

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        del key  # the dialogues were sampled with this key
        recording: DialogueRecording | None = collector.sharded.get(RECORDING)
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
        return collector.remove(RECORDING), dialogue_batch(networks, params, recording, score)

    return problem_of_dialogues(networks, collect)
