"""Tests Flax collections beside `params`: constants of a run, or refused collections."""

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import own_modules
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from own_modules import Bigrams, Both, Counting, Critic, Noisy, Policy, Through
from tables import cases

from jaxrl_po import control, language, run, variables
from jaxrl_po.algorithms import a2c, grpo, npg, ppo, ppo_penalty, reinforce, trpo
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.control import networks
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import control as script
from jaxrl_po.run.experiment import settings

ENV = gymnax.make("CartPole-v1")[0]
TASK = language.tasks.addition(1)
SIZES = {"num_envs": 4, "num_steps": 8}
FIT = {"value_epochs": 1, "value_minibatches": 2}
STEPS = {"num_epochs": 1, "num_minibatches": 2}


def on_control(**modules):
    return control.make_problem(
        ENV, **SIZES, **(modules or {"policy": Policy(), "critic": Critic()})
    )


def on_groups():
    return control.make_groups(ENV, num_prompts=2, group_size=2, num_steps=8, policy=Policy())


def on_language(**options):
    size = TASK.tokenizer.size
    return language.make_problem(
        TASK, Bigrams(size), critic=Bigrams(size, 1), num_prompts=2, group_size=2, **options
    )


LEARNERS = {
    "ppo": lambda: ppo.make(ppo.Config(**STEPS), on_control()),
    "ppo_shared": lambda: ppo.make(ppo.Config(**STEPS), on_control(actor_critic=Both())),
    "ppo_decayed": lambda: ppo.make(ppo.Config(**STEPS), on_control(), optax.adamw(1e-3)),
    "ppo_penalty": lambda: ppo_penalty.make(ppo_penalty.Config(**STEPS), on_control()),
    "a2c": lambda: a2c.make(a2c.Config(), on_control()),
    "reinforce": lambda: reinforce.make(reinforce.Config(**FIT), on_control()),
    "npg": lambda: npg.make(npg.Config(**FIT), on_control()),
    "trpo": lambda: trpo.make(trpo.Config(**FIT), on_control()),
    "grpo": lambda: grpo.make(grpo.Config(use_reference=True), on_groups()),
    "ppo_language": lambda: ppo.make(ppo.Config(**STEPS), on_language()),
    "grpo_language": lambda: grpo.make(grpo.Config(use_reference=True), on_language()),
    "grpo_stale": lambda: grpo.make(
        grpo.Config(), on_language(sampler=language.Sampler(staleness=2))
    ),
}


def size_of(tree):
    """Counts the numbers in arrays, such as Adam's two moments of each parameter."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if leaf.ndim)


def names(tree):
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize("name", LEARNERS)
def test_constants_are_handed_on_by_every_update(name):
    """The program returns its own input, so that no constant can have moved."""
    learner = LEARNERS[name]()
    state, batch = jax.eval_shape(lambda key: learner.sample(learner.init(key)), jax.random.key(0))
    program, (after, _) = jax.make_jaxpr(learner.update, return_shape=True)(state, batch)
    before, after = names(state), names(after)
    given = dict(zip(before, program.jaxpr.invars, strict=False))
    made = dict(zip(after, program.jaxpr.outvars, strict=False))
    constants = [each for each in before if "constants" in each or "scaled" in each]
    roles = {"policy"} if "grpo" in name and "language" not in name else {"policy", "value"}
    if name in ("ppo_shared", "grpo_stale"):
        roles = set(state.params.constants)
    assert set(state.params.constants) == roles
    assert set(state.params.policy) == {"params"}
    assert constants
    for each in constants:
        assert each.startswith(".params.constants"), "constants have no moments and no reference"
        assert made[each] is given[each]
    policy, value = (size_of(each) for each in (state.params.policy, state.params.value))
    moments = 1 if name == "a2c" else 2  # RMSProp has no first moment
    assert size_of(state.opt_state) / moments in (policy, value, policy + value)
    moved = [each for each in before if each.startswith(".params.policy")]
    assert all(made[each] is not given[each] for each in moved)


def test_a_constant_acts_as_one_that_is_baked():
    """Gradient norm, step and loss equal those of the module that contains the constant."""
    config = ppo.Config(**STEPS)
    learner = ppo.make(config, on_control())
    state, batch = jax.jit(lambda key: learner.sample(learner.init(key)))(jax.random.key(0))
    scales = jax.tree.map(
        lambda scale: tuple(scale.tolist()),
        {
            role: each["constants"]["Scaled_0"]["scale"]
            for role, each in state.params.constants.items()
        },
    )
    baked = on_control(policy=Policy(scales["policy"]), critic=Critic(scales["value"]))
    after, metrics = jax.jit(learner.update)(state, batch)
    state = state._replace(params=state.params._replace(constants=None))
    want, of_baked = jax.jit(ppo.make(config, baked).update)(state, batch)
    jax.tree.map(
        lambda x, y: assert_allclose(x, y, rtol=1e-5, atol=1e-7),
        (
            after.params.without_frozen(),
            after.opt_state,
            {k: m.value() for k, m in metrics.items()},
        ),
        (want.params.without_frozen(), want.opt_state, {k: m.value() for k, m in of_baked.items()}),
    )


def test_constants_are_saved_and_differ_by_seed(tmp_path):
    learner = a2c.make(a2c.Config(), on_control())
    options = {"seeds": 2, "steps_per_iteration": 32, "out": tmp_path / "run"}
    first = run.train(learner, 1, **options)
    state = run.train(learner, 2, resume=True, **options).state
    jax.tree.map(assert_array_equal, first.state.params.constants, state.params.constants)
    for leaf in jax.tree.leaves(state.params.constants):
        assert leaf.shape == (2, 4)
        assert not np.array_equal(*leaf)
    loaded = run.load(tmp_path / "run", learner=learner, seed_index=1, checkpoint="latest")
    assert loaded.iteration == 2
    jax.tree.map(assert_array_equal, loaded.params, jax.tree.map(lambda x: x[1], state.params))


@pytest.mark.usefixtures("trace_only")
def test_a_run_of_the_command_carries_constants(tmp_path):
    """Constants are carried over two devices, in evaluations, from the run's folder, and into a run
    that starts from this run."""
    own = own_modules.__file__
    flags = [
        *(f"--problem.{name}={size}" for name, size in SIZES.items()),
        *(f"--policy={own}:Policy", f"--critic={own}:Critic", "--seeds=1", "--total_steps=32"),
        *("--eval_episodes=2", "--config.num_minibatches=2"),
    ]
    out = tmp_path / "run"
    assert launch.control([*flags, "--mesh=data:2", f"--out={out}"]) == 0
    loaded = run.load(out)
    assert int(loaded.act(jnp.zeros(4))) in (0, 1)
    saved = loaded.params.constants
    assert set(saved) == {"policy", "value"}
    config = settings.parse_settings(script, [*flags, f"--init_from={out}"]).config
    job = script.build(config, Placement(config.run.seeds, 1, 1), script.open_world(config))
    begun = jax.tree.map(lambda x: x[0], job.learner.init(job.start).params.constants)
    jax.tree.map(assert_array_equal, begun, saved)


MEMORY = networks.Recurrent(
    Through(nn.BatchNorm(use_running_average=True), networks.Torso((4,))),
    networks.CategoricalHead(2),
    4,
)


@cases(
    "policy, collections",
    (Through(nn.BatchNorm(use_running_average=True), networks.CategoricalHead(2)), 1),
    (Through(nn.Dropout(0.5, deterministic=True), networks.CategoricalHead(2)), 0),
    (MEMORY, 1),
    (Policy((1.0,) * 4), 0),  # the module sows values, which are dropped
)
def test_modules_that_only_read_are_taken(policy, collections):
    problem = on_control(policy=policy, critic=networks.Critic(networks.Torso((4,))))
    params = jax.eval_shape(problem.init, jax.random.key(0))[0]
    assert len((params.constants or {}).get("policy", {})) == collections
    assert set(params.policy) == {"params"}


def test_what_a_module_sows_is_no_constant():
    made = {"params": {"w": 1.0}, "intermediates": {"x": (2.0,)}, "constants": {"c": 3.0}}
    want = {"params": {"w": 1.0}}, {"constants": {"c": 3.0}}
    assert variables.split(Policy(), made) == want
    assert variables.split(object(), made) == (made, None)


WRITES, DRAWS = "must not write to a collection .*LayerNorm", "must draw no random .*deterministic"


@cases(
    "layer, message",
    (nn.BatchNorm(use_running_average=False), WRITES),
    (Counting(), WRITES),
    (nn.Dropout(0.5, deterministic=False), DRAWS),
    (Noisy(), DRAWS),
)
def test_modules_that_write_or_draw_are_refused(layer, message):
    head, size = networks.CategoricalHead(2), TASK.tokenizer.size
    for name, modules in {
        "policy": {"policy": Through(layer, head), "critic": Critic()},
        "critic": {"policy": Policy(), "critic": Through(layer, networks.ValueHead())},
        "actor_critic": {"actor_critic": Through(layer, Both())},
    }.items():
        with pytest.raises(ConfigError, match=f"^{name}: {message}"):
            on_control(**modules)
    with pytest.raises(ConfigError, match=f"^policy: {message}"):
        control.make_groups(ENV, num_prompts=2, group_size=2, policy=Through(layer, head))
    with pytest.raises(ConfigError, match=f"^model: {message}"):
        language.make_problem(TASK, Bigrams(size, layer=layer))
    with pytest.raises(ConfigError, match=f"^critic: {message}"):
        language.make_problem(TASK, Bigrams(size), critic=Bigrams(size, 1, layer))


def test_a_warm_start_trains_parameters_alone():
    warm = language.WarmStart(steps=2, batch_size=2, learning_rate=0.1)
    cold, warmed = (
        jax.jit(on_language(warm=each).init)(jax.random.key(0))[0] for each in (None, warm)
    )
    jax.tree.map(assert_array_equal, cold.constants, warmed.constants)
    assert set(warmed.policy) == {"params"}
    assert not np.array_equal(*(jax.tree.leaves(each.policy)[0] for each in (cold, warmed)))
