"""Shows the trained policy: `jaxrl-po render --run=runs/cartpole --out=cartpole.gif`.

For a `jaxrl-po control` run, finished or still running, the command plays one episode of one seed
from a checkpoint, which is only read, and writes a GIF. For a `jaxrl-po language` run, the command
prints the completions of the first seed at the last evaluation.
"""

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import config as config_lib
from jaxrl_po.config import NON_NEGATIVE, SEED, ConfigError, Interval, static
from jaxrl_po.control import Observation, adapt, recorded, unroll
from jaxrl_po.control.actor import actor_of
from jaxrl_po.run.data import transcripts
from jaxrl_po.run.devices.compilation import compiled, is_cheap
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.experiment import control, earlier, flags, language
from jaxrl_po.run.experiment.control_config import ControlConfig
from jaxrl_po.run.figures import rendering
from jaxrl_po.run.figures.rendering import Draw, Episode, Floats, Frame
from jaxrl_po.run.host.vector_envs import Array, PoolStep, Source, playable, quiet
from jaxrl_po.run.store import folder, metrics
from jaxrl_po.types import ActorCritic, CollectorState, Problem, PyTree, TrainState


class Scene(NamedTuple):
    """Drawing style of an environment.

    Attributes:
      draw: `(axes, episode, t) -> None`, draws one time step.
      fps: number of frames per second that suits the pace of the environment.
    """

    draw: Draw
    fps: int


SCENES = {
    "CartPole-v1": Scene(rendering.cart_pole, 30),
    "Pendulum-v1": Scene(rendering.pendulum, 20),
    "Acrobot-v1": Scene(rendering.acrobot, 15),
    "MountainCar-v0": Scene(functools.partial(rendering.mountain_car, goal=0.5), 30),
    "MountainCarContinuous-v0": Scene(functools.partial(rendering.mountain_car, goal=0.45), 30),
    **{f"{name}-bsuite": Scene(rendering.grid, 5) for name in ("Catch", "DeepSea", "MNISTBandit")},
}
OTHER = Scene(rendering.components, 10)


@config_lib.record
class RenderOptions:
    """Options of the episode to play and of the episode's rendering, or of the text to print."""

    run: str = static("", "folder of a run of jaxrl-po control or language")
    out: str = static(
        "",
        "GIF to write; empty for episode.gif in the folder of the run. For a run of language, .txt "
        "file to write; empty to print the text. Further flags, except --all, apply to a GIF alone",
    )
    all: bool = static(
        False, "language: print completions of all evaluations, prompt by prompt, not of the last"
    )
    seed_index: int = static(0, "index of the seed that plays, from 0", within=NON_NEGATIVE)
    checkpoint: str = static(
        "best", f"checkpoint that plays; {earlier.WHICH}", choices=earlier.CHECKPOINTS
    )
    greedy: bool = static(True, "take the mode of the policy; otherwise sample")
    seed: int = static(0, "seed of the episode's random numbers", within=SEED)
    max_steps: int = static(
        0,
        "maximum length of the episode; 0 is the environment's own limit",
        unit="steps",
        within=NON_NEGATIVE,
    )
    width: int = static(
        480,
        "width of a frame; the height is three quarters of the width",
        unit="pixels",
        within=Interval(120, 1920),
    )


STEPS = 1000  # number of time steps in one call of the compiled program that plays an episode


class Player(NamedTuple):
    """Policy of one seed at one checkpoint, with the environment to play in.

    Attributes:
      world: Environment of the run.
      problem: Problem whose policy acts.
      state: Training state of the seed; playing does not update the observation statistics.
      iteration: Iteration of the checkpoint.
      title: Algorithm, environment and seed, as a title of the animation.
    """

    world: control.World
    problem: Problem
    state: TrainState
    iteration: int
    title: str


def restore(options: RenderOptions, config: ControlConfig) -> Player:
    """Rebuilds the problem of a run and reads the checkpoint that the options name."""
    run = config.run
    earlier.require_seed("seed_index", options.seed_index, run.seeds, "run", options.run)
    which = options.run, options.checkpoint
    _, iteration, state = earlier.state(control, config, "run", *which)
    title = f"{control.title(config)}, seed {options.seed_index}"
    state = select_seed(state, options.seed_index)
    world = control.open_world(config)
    return Player(world, control.build_problem(config, world), state, iteration, title)


def play_episode(player: Player, key: jax.Array, *, max_steps: int, greedy: bool) -> Episode:
    """Plays one episode; consumes `key`.

    The episode equals the first episode that `control.make_evaluate` plays with the same key.
    """
    # A single episode needs a single starting state, so no further starting states are prepared.
    environment = adapt(player.world.env)._replace(refresh=None)
    actor = actor_of(player.problem)
    reset_key, step_key = jax.random.split(key)
    num_steps = min(max_steps, STEPS)

    def begin() -> unroll.EnvState:
        return unroll.start(environment, reset_key, jnp.arange(1, dtype=jnp.int32), actor.start(1))

    def go_on(
        params: ActorCritic, collector: CollectorState, envs: unroll.EnvState, first: jax.Array
    ) -> tuple[unroll.EnvState, unroll.EnvTrajectory]:
        policy = functools.partial(actor.act, params, collector)
        return unroll.unroll(
            environment, policy, envs, step_key, num_steps=num_steps, first=first, greedy=greedy
        )

    given, light = (player.state.params, player.state.collector), is_cheap(player.state)
    envs, over = compiled(begin, light=light)(), False
    played = compiled(go_on, *given, envs, np.int32(0), light=light)
    parts: list[unroll.EnvTrajectory] = []
    while not over and len(parts) * num_steps < max_steps:
        envs, part = played(*given, envs, np.int32(len(parts) * num_steps))
        parts.append(jax.tree.map(lambda x: np.asarray(x[0]), part))
        over = bool((part.transition.terminated | part.transition.truncated).any())
    trajectory = jax.tree.map(lambda *parts: np.concatenate(parts), *parts)
    transition = trajectory.transition
    # The environment resets itself and continues, so the trajectory is cut after its first end.
    ended = np.flatnonzero(transition.terminated | transition.truncated)
    length = min(int(ended[0]) + 1 if over else max_steps, max_steps)
    seen = jax.tree.map(
        lambda x, last: np.concatenate([x[:length], last[length - 1 : length]]),
        trajectory.observation,
        transition.final_observation,
    )
    return Episode(to_draw(seen), trajectory.action[:length], transition.reward[:length])


def to_draw(seen: PyTree) -> Floats:
    """Returns the drawn part of an episode's observations `[T + 1, …]`; bytes are scaled to [0, 1].

    An observation of one array is drawn completely. A structured observation is drawn as its image
    or, without an image, as all numbers that the policy reads, side by side.
    """
    policy = seen.policy if isinstance(seen, Observation) else seen
    leaves = [
        np.asarray(x / 255.0 if x.dtype == np.uint8 else x, np.float32)
        for x in jax.tree.leaves(policy)
    ]
    images = [x for x in leaves if x.ndim == 4]
    if len(leaves) == 1 or images:
        return (images or leaves)[0]
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


class Camera:
    """A pool of one gymnasium environment, which can render images.

    Args:
      env: gymnasium environment made with `render_mode="rgb_array"`.
      seed: random seed of the environment's first episode.
    """

    def __init__(self, env: Any, seed: int):
        self._env, self._seed = env, seed
        self.fps = int(env.metadata.get("render_fps", 30))

    def reset(self) -> Array:
        """Starts an episode as `vector_envs.Pool` does; returns observations `[1, …]`."""
        return np.asarray(self._env.reset(seed=self._seed)[0])[None]

    def step(self, action: Array) -> PoolStep:
        """Takes one step as `vector_envs.Pool` does, with actions `[1, …]`."""
        observation, *others = self._env.step(playable(self._env.action_space)(action)[0])[:4]
        return PoolStep(np.asarray(observation)[None], *(np.asarray(x)[None] for x in others))

    def picture(self) -> Frame:
        """Renders an image `[H, W, 3]` of the environment in its present state."""
        return np.asarray(self._env.render(), np.uint8)

    def close(self) -> None:
        """Closes the gymnasium environment."""
        self._env.close()


def film(
    player: Player, source: Source, options: RenderOptions, max_steps: int
) -> tuple[Episode, Scene]:
    """Plays one episode on the host; the scene shows images if the environment renders any.

    Raises:
      PoolError: the environment raised an error or died.
    """
    problem, greedy = player.problem, options.greedy
    act = jax.jit(functools.partial(recorded.act, problem, source.spaces, greedy=greedy))
    state = player.state._replace(key=jax.random.key(options.seed))
    memory, begins = actor_of(problem).start(1), np.zeros(1, bool)
    camera, why = _camera(source, options.seed)
    pool = camera or source.open([options.seed])
    with contextlib.closing(pool), quiet():
        seen, actions, rewards = [pool.reset()], [], []
        taken = [camera.picture()] if camera else []
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
    observed = np.concatenate(seen).astype(np.float32)
    episode = Episode(observed, np.stack(actions), np.array(rewards, np.float32))
    if camera:
        draw = functools.partial(rendering.picture, pictures=taken)
        return episode, Scene(draw, min(camera.fps, 50))
    print(f"drawn from the observations, since gymnasium takes no pictures here: {why}")
    if observed.ndim == 4:  # observations are images: draws only the newest of stacked frames
        return episode._replace(observation=observed[..., -1:] / 255.0), Scene(rendering.grid, 15)
    return episode, OTHER


def _camera(source: Source, seed: int) -> tuple[Camera | None, str]:
    """Returns a camera on the gymnasium environment, or None and the reason why no image exists."""
    import gymnasium

    if not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads MUJOCO_GL at its import
    suite, _, name = source.name.partition(":")
    of_many = ("vectorization_mode", "num_threads")
    arguments = {key: value for key, value in source.arguments.items() if key not in of_many}
    if suite != "gymnasium" and arguments and source.make is None:
        return None, f"{', '.join(arguments)} of --env_params are arguments of {suite}"
    try:
        with quiet():
            make = source.make or functools.partial(gymnasium.make, name, **arguments)
            camera = Camera(make(render_mode="rgb_array"), seed)
            seen = camera.reset()
            camera.picture()
    except Exception as error:  # any error of gymnasium: a package or a display may be missing
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"
    observed = jax.eval_shape(source.spaces.observe, seen[0]).shape
    if observed != source.spaces.observation.shape:
        camera.close()
        return None, f"its {name} observes {list(observed)}"
    return camera, ""


def transcribe(options: RenderOptions) -> int:
    """Prints the samples of a language run, or writes the samples to a file."""
    for name in vars(options):
        if name not in ("run", "out", "all") and config_lib.changed(options, name):
            raise ConfigError(name, "must be left out with a run of jaxrl-po language")
    out = folder.require_file(options.out, ".txt") if options.out else None
    text = transcripts.read(Path(options.run) / "samples.jsonl", every=options.all)
    if not text:
        why = "it was made with show = 0, or has not been evaluated yet"
        raise ConfigError("run", f"{options.run} holds nothing to read: {why}")
    if out is None:
        print(text)
        return 0
    with folder.writing(out):
        metrics.write_atomically(out, text + "\n")
    print(f"see {out}")
    return 0


def main(argv: Sequence[str]) -> int:
    """Runs the command `render`; returns the exit status."""
    options = flags.ask(argv, "jaxrl-po render", "Shows what a run learned.", RenderOptions)
    if options is None:
        return 0
    if earlier.maker([control, language], "run", options.run)[0] is language:
        return transcribe(options)
    if options.all:
        raise ConfigError("all", "must be left out with a run of jaxrl-po control")
    config = earlier.read_config(control, "run", options.run)
    out = folder.require_file(options.out or str(Path(options.run) / "episode.gif"), ".gif")
    player = restore(options, config)
    source = player.world.source
    own = adapt(player.world.env) if source is None else source
    limit = options.max_steps or own.max_steps
    if not limit:
        raise ConfigError("max_steps", "must be at least 1: the environment has no limit")
    if source is None:
        key = jax.random.key(options.seed)
        episode = play_episode(player, key, max_steps=int(limit), greedy=options.greedy)
        plain = Scene(rendering.grid, 10) if episode.observation.ndim == 4 else OTHER
        scene = SCENES.get(config.run.env, plain)
    else:
        episode, scene = film(player, source, options, int(limit))
    with folder.writing(out):
        pictures = rendering.frames(scene.draw, episode, title=player.title, width=options.width)
        rendering.save_gif(pictures, out, fps=scene.fps)
    total = float(np.sum(episode.reward, dtype=np.float64))
    which = f"{options.checkpoint} checkpoint (iteration {player.iteration})"
    steps = f"{len(episode.reward)} steps, return {total:.5g}"
    print(f"{player.title}, {which}: {steps}, see {out}")
    return 0
