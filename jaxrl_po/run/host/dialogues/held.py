"""What a run does with dialogues on the host: iterations, evaluations and examples."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po.language import sampling
from jaxrl_po.language.dialogues import recorded
from jaxrl_po.language.dialogues.evaluation import SHOWN, Games, measure, render
from jaxrl_po.language.dialogues.problem import Recording
from jaxrl_po.language.evaluation import GREEDY, SAMPLED
from jaxrl_po.language.networks import prompt_keys
from jaxrl_po.language.tasks.types import held_out, num_asked, selecting
from jaxrl_po.learner import next_key
from jaxrl_po.masked import Mean
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices.seeds import STATE_AXES, stack
from jaxrl_po.run.host.dialogues.engine import (
    DialogueEngine,
    Episode,
    Reporter,
    Scene,
    policy_of,
)
from jaxrl_po.run.host.rollouts import seed_of
from jaxrl_po.types import ActorCritic, Metrics, PyTree, Row, TrainState

Array = npt.NDArray[Any]


class HostDialogues(NamedTuple):
    """Dialogues of one seed, held on the host.

    Attributes:
      scene: see `Scene`.
      eval_prompts: held-out prompts of an evaluation; 0 for each row of its set.
      eval_samples: samples of each beside the greedy dialogue.
      show: held-out prompts whose dialogues are drawn.
    """

    scene: Scene
    eval_prompts: int
    eval_samples: int = 0
    show: int = 0

    def open(self, base_seed: int, seeds: Sequence[int]) -> "Dialogues":
        """See `Dialogues`."""
        return Dialogues(self, base_seed, seeds)


class Dialogues(DialogueEngine):
    """Holds the dialogues of iterations and evaluations.

    The random numbers of environments follow from the base seed, the index of the seed, the
    iteration and the prompt, and after a reset from the member of the group too.

    Args:
      host: see `HostDialogues`.
      base_seed: of the run.
      seeds: index of the seed of each row of the state.
    """

    def __init__(self, host: HostDialogues, base_seed: int, seeds: Sequence[int]):
        super().__init__(host.scene, len(seeds))
        self._host, self._base, self._seeds = host, base_seed, list(seeds)
        self._report: Reporter = lambda line: None
        self._outside = 0.0
        self._draw = jax.jit(
            stack(self._drawn, len(self._seeds), in_axes=(STATE_AXES,), out_axes=0)
        )

    def with_recording(self, state: TrainState, recording: Recording) -> TrainState:
        """See `recorded.with_recording`."""
        return recorded.with_recording(state, recording)

    @property
    def examples(self) -> Examples | None:
        """Dialogues of the first seed, to read."""
        task = self._scene.task

        def shown(games: PyTree) -> list[Row]:
            return [{"seed": 0, **row} for row in render(task, games)]

        return Examples(self.describe, shown) if self._host.show else None

    def record(self, state: TrainState, report: Reporter) -> tuple[TrainState, Recording]:
        """Holds the dialogues of one iteration.

        Args:
          state: stacked over seeds.
          report: called with a line for the user.

        Raises:
          PoolError: the process of the environments has ended.
          RewardError: a reset or a reward failed in the first dialogues.
        """
        self._report = report  # of evaluations too
        iteration, group = int(np.max(state.step)), self._scene.settings.group_size
        problem, keys = self._draw(self._acting(state))
        episodes = [
            self._episode(row, member, seed, iteration, number)
            for seed, rows in zip(self._seeds, np.asarray(problem), strict=True)
            for number, row in enumerate(rows)
            for member in range(group)
        ]
        made, self._outside = self.hold(
            self._params(state), episodes, keys, greedy=False, report=report
        )
        return state, made

    def metrics(self, seconds: float) -> Metrics:
        """The share of an iteration of that many seconds which was spent outside the program."""
        count: Any = np.ones(len(self._seeds), np.float32)
        return {"outside": Mean(count * np.float32(self._outside / seconds), count)}

    def evaluate(self, state: TrainState, later_seed: int | None = None) -> dict[str, Array]:
        """Metrics of dialogues that begin with held-out prompts, `[S, prompts]` each.

        Args:
          state: stacked over seeds.
          later_seed: of a later evaluation; None for the run's own.
        """
        prompts, every = self._host.eval_prompts or None, range(len(self._seeds))
        found = {
            name: _games(self._held_out(state, later_seed, prompts, samples, every))
            for name, samples in ((GREEDY, 0), (SAMPLED, self._host.eval_samples))
            if samples or name == GREEDY
        }
        return jax.tree.map(np.asarray, measure(found))

    def describe(self, state: TrainState) -> dict[str, Games]:
        """Dialogues of the first seed, for `dialogues.render`."""
        return {
            name: _games(
                jax.tree.map(
                    lambda x: x[0], self._held_out(state, None, self._host.show, samples, (0,))
                )
            )
            for name, samples in ((GREEDY, 0), (SAMPLED, SHOWN))
        }

    def _held_out(
        self,
        state: TrainState,
        later_seed: int | None,
        prompts: int | None,
        samples: int,
        seeds: Sequence[int],
    ) -> Recording:
        """`samples` dialogues of each held-out prompt, 0 for a greedy one, `[S, prompts, n, …]`.

        See `evaluate` for the other arguments.
        """
        if later_seed is None:
            task, key = selecting(self._scene.task), jax.random.split(jax.random.key(self._base))[1]
        else:
            task, key = self._scene.task, jax.random.key(later_seed)
        count, every = max(samples, 1), len(self._seeds)
        prompt_key, number_key = jax.random.split(key)
        asked = num_asked(task, prompts)
        pairs = jax.vmap(jax.random.split)(jax.random.split(prompt_key, asked))
        rows = np.repeat(np.asarray(held_out(task, pairs[:, 0]).problem), count)
        keys = sampling.member_keys(pairs[:, 1], count)
        drawn = int(jax.random.randint(number_key, (), 0, 2**31 - 1))
        size, parts = self._scene.rows, []
        for first in range(0, len(rows), size):
            numbers = np.arange(first, first + size)
            within = numbers < len(rows)
            episodes = [
                self._episode(rows[n], n % count, drawn, n // count)
                if inside and seed in seeds
                else None
                for seed in range(every)
                for n, inside in zip(numbers.tolist(), within, strict=True)
            ]
            some = jnp.broadcast_to(keys[np.minimum(numbers, len(rows) - 1)], (every, size))
            made, _ = self.hold(
                self._params(state), episodes, some, greedy=samples == 0, report=self._report
            )
            parts.append(jax.tree.map(lambda x, within=within: np.asarray(x)[:, within], made))
        whole: Recording = jax.tree.map(lambda *each: np.concatenate(each, axis=1), *parts)
        shaped: Recording = jax.tree.map(
            lambda x: x.reshape(every, asked, count, *x.shape[2:]), whole
        )
        return shaped

    def _episode(self, row: Any, member: int, *entropy: int) -> Episode:
        """A dialogue of a group, whose resets follow from `entropy` alone."""
        seeds = seed_of(self._base, *entropy), seed_of(self._base, *entropy, 1 + member)
        return Episode(int(row), seeds)

    def _drawn(self, state: TrainState) -> tuple[jax.Array, jax.Array]:
        """Rows `[P]` and keys `[B]` of the coming iteration, those of a single turn."""
        keys = prompt_keys(state.collector, next_key(state)[1])
        sample = jax.vmap(lambda key: self._scene.task.sample(key, False).problem)
        return sample(keys[:, 0]), sampling.member_keys(keys[:, 1], self._scene.settings.group_size)

    def _acting(self, state: TrainState) -> TrainState:
        """What `_draw` reads of a state, on one device."""
        part = state._replace(params=ActorCritic(None), opt_state=None, reference_params=None)
        moved: TrainState = jax.device_put(part, jax.devices()[0])
        return moved

    def _params(self, state: TrainState) -> ActorCritic:
        """The policy, on one device."""
        moved: ActorCritic = jax.device_put(policy_of(state), jax.devices()[0])
        return moved


def _games(found: Recording) -> Games:
    """Dialogues `[…, P, n, …]`, each measure the mean of a dialogue: 0 where it is of nothing."""
    measures = {name: x.total / np.maximum(x.count, 1.0) for name, x in found.measures.items()}
    prompt, pad = found.prompt[..., 0, :], found.pad[..., 0]
    return Games(prompt, pad, found.held, found.score, measures)
