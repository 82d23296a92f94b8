"""One episode in an environment of the host, with the pictures that gymnasium takes of it."""

import contextlib
import functools
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_po.control import recorded
from jaxrl_po.control.actor import actor_of
from jaxrl_po.run.figures.rendering import Episode, Frame
from jaxrl_po.run.host.vector_envs import Array, Source, Stepped, playable, quiet
from jaxrl_po.types import Problem, TrainState


class Film(NamedTuple):
    """An episode and its pictures.

    Attributes:
      episode: see `Episode`.
      pictures: one for each observation, or empty where gymnasium can take none.
      fps: frames per second that suit the environment.
      why: the reason why there are no pictures, or empty.
    """

    episode: Episode
    pictures: list[Frame]
    fps: int
    why: str


class Camera:
    """A single environment of gymnasium as a pool of one, whose pictures can be taken.

    Args:
      env: made with `render_mode="rgb_array"`.
      seed: of its first episode.
    """

    def __init__(self, env: Any, seed: int):
        self._env, self._seed = env, seed
        self.fps = int(env.metadata.get("render_fps", 30))

    def reset(self) -> Array:
        """See `pools.Pool`."""
        return np.asarray(self._env.reset(seed=self._seed)[0])[None]

    def step(self, action: Array) -> Stepped:
        """See `pools.Pool`."""
        observation, *others = self._env.step(playable(self._env.action_space)(action)[0])[:4]
        return Stepped(np.asarray(observation)[None], *(np.asarray(x)[None] for x in others))

    def picture(self) -> Frame:
        """What the environment looks like now, `[H, W, 3]`."""
        return np.asarray(self._env.render(), np.uint8)

    def close(self) -> None:
        """See `pools.Pool`."""
        self._env.close()


def film(
    source: Source, problem: Problem, state: TrainState, *, seed: int, max_steps: int, greedy: bool
) -> Film:
    """Plays one episode.

    Args:
      source: of the environment.
      problem: whose policy acts.
      state: of one seed.
      seed: of the environment, and of the policy where it samples.
      max_steps: maximum length.
      greedy: take the mode of the policy; otherwise sample.

    Raises:
      PoolError: the environment failed.
    """
    act = jax.jit(functools.partial(recorded.act, problem, source.spaces, greedy=greedy))
    state = state._replace(key=jax.random.key(seed))
    memory, begins = actor_of(problem).start(1), np.zeros(1, bool)
    camera, why = _camera(source, seed)
    pool = camera or source.open([seed])
    with contextlib.closing(pool), quiet():
        seen, taken, actions, rewards = [pool.reset()], list[Frame](), [], []
        taken += [camera.picture()] if camera else []
        for t in range(max_steps):
            observation = seen[-1].astype(source.dtype)
            memory, action, played = act(state, memory, observation, begins, np.int32(t))
            stepped = pool.step(np.asarray(played))
            seen.append(stepped.observation)
            actions.append(np.asarray(action)[0])
            rewards.append(float(stepped.reward[0]))
            taken += [camera.picture()] if camera else []
            if stepped.terminated[0] or stepped.truncated[0]:
                break
    episode = Episode(
        np.concatenate(seen).astype(np.float32), np.stack(actions), np.array(rewards, np.float32)
    )
    return Film(episode, taken, camera.fps if camera else 10, why)


def _camera(source: Source, seed: int) -> tuple[Camera | None, str]:
    """The environment of gymnasium of that name, or None and why it takes no pictures."""
    import gymnasium

    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is imported
    suite, _, name = source.name.partition(":")
    of_many = ("vectorization_mode", "num_threads")
    arguments = {key: value for key, value in source.arguments.items() if key not in of_many}
    if suite != "gymnasium" and arguments:
        return None, f"{', '.join(arguments)} of --env_params are arguments of {suite}"
    try:
        with quiet():
            camera = Camera(gymnasium.make(name, render_mode="rgb_array", **arguments), seed)
            seen = camera.reset()
            camera.picture()
    except Exception as error:  # of a package we do not know, for want of a display or of itself
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"
    observed = jax.eval_shape(source.spaces.observe, seen[0]).shape
    if observed != source.spaces.observation.shape:
        camera.close()
        return None, f"its {name} observes {list(observed)}"
    return camera, ""
