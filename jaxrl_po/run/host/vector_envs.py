"""Host environments, stepped side by side: EnvPool's, and gymnasium's vector environments.

Both EnvPool and gymnasium take one more step after an episode's end; the extra step ignores its
action and returns the first observation of the next episode.
"""

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po import backend
from jaxrl_po.config import ConfigError, Json, check_size
from jaxrl_po.control.spaces import Spaces, is_discrete, is_image, read_spaces
from jaxrl_po.run import errors
from jaxrl_po.run.errors import RunError

SUITES = ("envpool", "gymnasium")
Array = npt.NDArray[Any]


class PoolError(RunError):
    """An environment raised an error or died; the message names the environment and the error."""


class PoolStep(NamedTuple):
    """Results of one step of N environments.

    Attributes:
      observation: `[N, …]`, the true next observation, even if the episode ended.
      reward: rewards of the step, `[N]`.
      terminated: `[N]`, bool, whether the episode ended in a terminal state.
      truncated: `[N]`, bool, whether a time limit ended the episode.
    """

    observation: Array
    reward: Array
    terminated: Array
    truncated: Array


class Pool(NamedTuple):
    """A pool of N environments, each with its own seed.

    Attributes:
      reset: `() -> [N, …]`, starts an episode in each environment and returns observations.
      step: `([N, …]) -> PoolStep`, takes actions; if an episode had ended, the action is ignored
        and a new episode starts.
      close: `() -> None`, frees the resources of the environments.
    """

    reset: Callable[[], Array]
    step: Callable[[Array], PoolStep]
    close: Callable[[], None]


class Source(NamedTuple):
    """One kind of host environment: its properties, and a function that opens pools.

    Attributes:
      name: name of the environment, as on the command line.
      spaces: observation space and action space of one environment.
      dtype: dtype of the recorded observations.
      max_steps: time limit of an episode in steps; None without a limit.
      arguments: arguments of the environment in `--env_params`.
      open: `(seeds) -> Pool`, opens one environment per seed; errors are raised as `PoolError`.
      make: `(**arguments) -> environment`, makes one environment of the user; None if a package
        registers the environment by its name.
    """

    name: str
    spaces: Spaces
    dtype: npt.DTypeLike
    max_steps: int | None
    arguments: Mapping[str, Any]
    open: Callable[[Sequence[int]], Pool]
    make: Callable[..., Any] | None = None


def is_host(name: str) -> bool:
    """Returns whether a name stands for a host environment.

    Example:
      >>> is_host("envpool:Hopper-v4"), is_host("CartPole-v1"), is_host("my_env.py:Corridor")
      (True, False, False)
    """
    return name.partition(":")[0] in SUITES


MUJOCO = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum"),
    *("InvertedPendulum", "Pusher", "Reacher", "Swimmer", "Walker2d"),
)


def family(name: str) -> str:
    """Returns the family whose settings a host environment shares, or the environment's own name.

    Example:
      >>> family("envpool:Hopper-v4"), family("gymnasium:CartPole-v1")
      ('MuJoCo', 'gymnasium:CartPole-v1')
    """
    return "MuJoCo" if name.partition(":")[2].partition("-")[0] in MUJOCO else name


def find_source(name: str, env_params: str = "") -> Source:
    """Finds the source of the environment `envpool:Name` or `gymnasium:Name`.

    Args:
      name: name of the environment, with its suite.
      env_params: JSON object with arguments of `envpool.make` or `gymnasium.make_vec`; or empty.

    Raises:
      ConfigError: the package is not installed, the name is unknown, or the environment does not
        accept the arguments.
      ConfigError: the type of the environment's spaces is not supported.
    """
    suite, _, inner = name.partition(":")
    arguments = errors.json_object("env_params", env_params or "{}")
    errors.require("env", suite, suite)
    return {"envpool": _envpool, "gymnasium": _gymnasium}[suite](name, inner, arguments)


def _envpool(name: str, inner: str, arguments: Json) -> Source:
    import envpool

    errors.lookup("env", inner, dict.fromkeys(envpool.list_all_envs()))
    for own in ("num_envs", "seed", "batch_size", "env_type"):
        if own in arguments:
            raise ConfigError("env_params", f"{own} is chosen by the run; leave it out")
    threads = {"num_threads": arguments.get("num_threads", backend.cores())}
    if type(threads["num_threads"]) is not int or threads["num_threads"] < 1:
        raise ConfigError(
            "env_params",
            f"num_threads must be a whole number of at least 1, got {threads['num_threads']!r}",
        )
    made_with = {key: value for key, value in arguments.items() if key != "num_threads"}
    try:
        with quiet():
            spec = envpool.make_spec(inner, **made_with)
            seen, acts = spec.gymnasium_observation_space, spec.gymnasium_action_space
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(
            "env_params", f"{name} does not accept them: {' '.join(str(error).split())}"
        ) from None
    spaces, play = _spaces(name, seen, acts), playable(acts)
    shape = spaces.observation.shape
    channels_first = len(shape) == 3 and is_image(seen) and shape[0] < shape[2]
    if channels_first:
        of_last = jax.ShapeDtypeStruct((shape[1], shape[2], shape[0]), jnp.uint8)
        spaces = spaces._replace(observation=of_last)

    def observe(observation: Array) -> Array:
        return np.moveaxis(observation, 1, -1) if channels_first else observation

    def open_pool(seeds: Sequence[int]) -> Pool:
        with quiet():
            pool = envpool.make(
                inner,
                env_type="gymnasium",
                num_envs=len(seeds),
                seed=list(seeds),
                **threads,
                **made_with,
            )

        def reset() -> Array:
            with quiet():  # on the first call, EnvPool creates float32 spaces, which warns
                return observe(pool.reset()[0])

        def step(action: Array) -> PoolStep:
            observation, reward, terminated, truncated, _ = pool.step(play(action))
            return PoolStep(observe(observation), reward, terminated, truncated)

        return Pool(reset, step, pool.close)

    limit = _limit(spec.config.max_episode_steps)
    return Source(name, spaces, _dtype(seen), limit, arguments, wrap_pool_errors(name, open_pool))


def _gymnasium(name: str, inner: str, arguments: Json) -> Source:
    import gymnasium
    from gymnasium.vector import AutoresetMode

    return _gymnasium_source(
        name,
        arguments,
        lambda count: gymnasium.make_vec(
            inner,
            num_envs=count,
            vector_kwargs={"autoreset_mode": AutoresetMode.NEXT_STEP},
            **{"vectorization_mode": "sync", **arguments},
        ),
    )


def own_source(name: str, found: Any, env: Any, env_params: str = "") -> Source:
    """Returns the source of a user's environment with gymnasium's interface.

    Args:
      name: name of the environment, for messages.
      found: class or function that makes an environment; or an environment, which is copied.
      env: environment that `found` made, which a further call must not return; or `found` itself.
      env_params: JSON object with arguments of the class or function, a time limit
        `max_episode_steps`, and `vectorization_mode` (sync or async); or empty.

    Raises:
      ConfigError: the environment cannot be made or copied, or its spaces are not supported.
    """
    import gymnasium
    from gymnasium import vector, wrappers

    arguments = errors.json_object("env_params", env_params or "{}")
    limit = arguments.pop("max_episode_steps", None)
    if limit is not None:
        check_size("env_params", limit, part="max_episode_steps")
    kinds = {"sync": vector.SyncVectorEnv, "async": vector.AsyncVectorEnv}
    kind: Any = errors.lookup("env_params", str(arguments.pop("vectorization_mode", "sync")), kinds)
    copies = isinstance(found, gymnasium.Env)
    if copies and arguments:
        raise ConfigError(
            "env_params", f"{name} is an object, which takes no {', '.join(arguments)}"
        )

    def make(**further: Any) -> Any:
        with quiet():
            made = copy.deepcopy(found) if copies else found(**{**arguments, **further})
            if made is env:
                raise ConfigError("env", f"{name} must make another environment in each call")
            return made if limit is None else wrappers.TimeLimit(made, limit)

    known = {} if limit is None else {"max_episode_steps": limit}
    source = _gymnasium_source(
        name,
        {**arguments, **known},
        lambda count: kind([make] * count, autoreset_mode=vector.AutoresetMode.NEXT_STEP),
    )
    return source._replace(make=make)


def _gymnasium_source(name: str, arguments: Json, make_pool: Callable[[int], Any]) -> Source:
    """Returns the source of gymnasium's vector environments.

    Args:
      name: name of the environment, for messages.
      arguments: arguments of the environment.
      make_pool: `(count) -> environments`, makes a vector environment.
    """
    from gymnasium.vector import AutoresetMode

    def make(count: int) -> Any:
        with quiet():
            return make_pool(count)

    try:
        one = make(1)
    except ConfigError:
        raise
    except Exception as error:  # an environment may lack a file, a display, a licence
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError("env", f"{name}: {said}") from error
    try:
        if one.metadata.get("autoreset_mode") != AutoresetMode.NEXT_STEP:
            raise ConfigError(
                "env",
                f"{name} must reset in the step after an episode's end (AutoresetMode.NEXT_STEP)",
            )
        seen = one.single_observation_space
        spec = one.spec or one.get_attr("spec")[0]
        registered = spec and spec.max_episode_steps
        limit = _limit(arguments.get("max_episode_steps", registered))
        acts = one.single_action_space
        spaces, play = _spaces(name, seen, acts), playable(acts)
    finally:
        one.close()

    def open_pool(seeds: Sequence[int]) -> Pool:
        envs = make(len(seeds))
        return Pool(
            lambda: envs.reset(seed=list(seeds))[0],
            lambda action: PoolStep(*envs.step(play(action))[:4]),
            envs.close,
        )

    return Source(name, spaces, _dtype(seen), limit, arguments, wrap_pool_errors(name, open_pool))


def playable(space: Any) -> Callable[[Array], Array]:
    """Returns a function that casts actions `[N, …]` to a gymnasium space and clips them to a box.

    The policy's actions are float32, which rounds a bound such as 0.1 to a number outside the box.
    """
    if not hasattr(space, "low"):
        return lambda action: action.astype(space.dtype)
    return lambda action: np.clip(action.astype(space.dtype), space.low, space.high)


def wrap_pool_errors(name: str, open_pool: Callable[[Sequence[int]], Pool]) -> Callable[..., Pool]:
    """Wraps `open_pool` so that any error of the pool or its functions becomes a `PoolError`."""

    def reported(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                message = " ".join(str(error).split())
                raise PoolError(f"env {name}: {type(error).__name__}: {message}") from error

        return call

    @reported
    def open_named(seeds: Sequence[int]) -> Pool:
        pool = open_pool(seeds)

        def step(action: Array) -> PoolStep:
            stepped = pool.step(action)
            for field, x in stepped._asdict().items():
                valid = [len(seeds), *(np.shape(x)[1:] if field == "observation" else ())]
                if np.size(x) != np.prod(valid):
                    raise ValueError(f"{field} of step must be {valid}, got {list(np.shape(x))}")
            return stepped

        return Pool(reported(pool.reset), reported(step), reported(pool.close))

    return open_named


def _spaces(name: str, seen: object, acts: object) -> Spaces:
    spaces = read_spaces(name, seen, acts)
    if not isinstance(spaces.observation, jax.ShapeDtypeStruct):
        raise ConfigError(
            "env",
            f"{name} must have observations of one array, got {type(seen).__name__}: flatten them "
            "by a wrapper",
        )
    return spaces


def _limit(steps: int | None) -> int | None:
    """Returns the time limit of episodes; None for 2³¹ − 1 and −1, which stand for no limit."""
    return steps if steps is not None and 0 < steps < 2**31 - 1 else None


def _dtype(space: object) -> npt.DTypeLike:
    """Returns the recorded dtype: uint8 for images, int32 for class indices, otherwise float32."""
    if is_discrete(space):
        return np.int32
    return np.uint8 if is_image(space) else np.float32


def quiet() -> warnings.catch_warnings:
    """Hides warnings of EnvPool and gymnasium, for example about old versions of an environment."""
    return warnings.catch_warnings(action="ignore")
