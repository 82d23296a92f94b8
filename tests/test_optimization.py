"""Tests `Config.optimizer` and `Config.schedule`: their names, and the matrices that Muon takes."""

import dataclasses
import importlib
import pkgutil
from typing import NamedTuple

import chex
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from numpy.testing import assert_allclose
from probes import tabular_problem
from tables import cases

from jaxrl_po import algorithms, control, language, optimizers
from jaxrl_po.algorithms import a2c, grpo, npg, ppo, reinforce, trpo
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError, setting_of
from jaxrl_po.control import networks
from jaxrl_po.control.memory import transformer
from jaxrl_po.distributions import Categorical
from jaxrl_po.language.lora import Lora
from jaxrl_po.run.experiment import control as script
from jaxrl_po.run.experiment import settings
from jaxrl_po.types import ActorCritic, Problem

# the gradient's norm is 5 · 10³, clipped to 1/2
GRADIENT = {"w": jnp.array([[3e3, 0.0], [0.0, 4e3]]), "b": jnp.zeros(2)}
PARAMS = {"w": jnp.array([[1.0, 2.0], [3.0, -4.0]]), "b": jnp.ones(2)}
METHODS = [
    importlib.import_module(f"jaxrl_po.algorithms.{each.name}")
    for each in pkgutil.iter_modules(algorithms.__path__)
]
METHODS = [each for each in METHODS if hasattr(each, "Config") and hasattr(each, "make")]
STEPPING = [each for each in METHODS if hasattr(each.Config, "learning_rate")]


def name_of(module):
    return module.__name__.rpartition(".")[2]


def of_matrix(params):
    """Returns `Problem.hidden_matrices` of a policy with the parameters above."""
    return ActorCritic(jax.tree.map(lambda x: x.ndim == 2, params.policy))


def chosen(module=ppo, given=None, **settings):
    """Returns the optimizer that a method chooses."""
    config, problem = module.Config(**settings), Problem(*[None] * 4)
    config.validate()
    default = a2c.rmsprop if module is a2c else optimizers.adam
    problem = problem._replace(hidden_matrices=of_matrix)
    return optimizers.choose_optimizer(config, problem, given, default)


def first_step(optimizer, params=PARAMS):
    return optimizer.update(GRADIENT, optimizer.init(params), params)[0]


def test_names_are_those_of_the_papers():
    """First steps by hand: sgd, Lion (sign), Adam (1 where ε is small), decay times parameters."""
    rate = {"learning_rate": 0.25, "optimizer_epsilon": 1e-9}
    assert_allclose(
        first_step(chosen(optimizer="sgd", **rate))["w"],
        -0.25 * np.array([[0.3, 0.0], [0.0, 0.4]]),
        rtol=1e-4,
    )
    decay = 0.125 * np.array([[1.0, 2.0], [3.0, -4.0]])
    for name in ("lion", "adamw"):
        assert_allclose(
            first_step(chosen(optimizer=name, weight_decay=0.125, **rate))["w"],
            -0.25 * (np.eye(2) + decay),
            rtol=1e-4,
        )
    assert_allclose(first_step(chosen(optimizer="adam", **rate))["w"], -0.25 * np.eye(2), rtol=1e-4)
    # RMSProp divides by √(0.01 g²): ten times the sign.
    assert_allclose(
        first_step(chosen(optimizer="rmsprop", **rate))["w"], -2.5 * np.eye(2), rtol=1e-4
    )
    step = first_step(chosen(optimizer="muon", weight_decay=0.0, **rate))["w"]
    # Newton-Schulz brings singular values near 1, whatever their initial size.
    assert_allclose(np.abs(np.linalg.eigvalsh(step)) / 0.25, 1.0, atol=0.35)


def test_step_sizes_are_vmapped():
    def step(rate, name):
        decay = {"weight_decay": rate} if name in optimizers.DECAYED else {}
        return first_step(chosen(optimizer=name, learning_rate=rate, **decay))

    rates = jnp.array([0.1, 0.2])
    for name in optimizers.OPTIMIZERS:
        both = jax.vmap(lambda rate, name=name: step(rate, name))(rates)
        for i, rate in enumerate((0.1, 0.2)):
            alone = step(jnp.float32(rate), name)
            jax.tree.map(
                lambda x, y, i=i: assert_allclose(x[i], y, rtol=1e-5, atol=1e-7), both, alone
            )


@pytest.mark.parametrize("module", METHODS, ids=name_of)
def test_every_step_size_has_optimizer_and_schedule(module):
    """Every field is described by `help`, with its line, unit and default."""
    names = {field.name for field in dataclasses.fields(optimizers.Optimization)}
    fields = {field.name: field for field in dataclasses.fields(module.Config)}
    assert names <= fields.keys() if module in STEPPING else not names & fields.keys()
    for name, field in fields.items():
        (line,) = (x for x in module.Config.__doc__.splitlines() if x.startswith(f"  {name}: "))
        assert setting_of(field).doc in line
        assert setting_of(field).unit in line
        assert f"default {field.default!r})" in line
    assert module.Config.__doc__.splitlines()[0].startswith("Hyperparameters of ")


def test_only_trpo_and_npg_have_no_step_size():
    assert [each for each in METHODS if each not in STEPPING] == [npg, trpo]


@pytest.mark.parametrize("module", STEPPING, ids=name_of)
def test_optimizer_fields_without_effect_are_refused(module):
    problem, given = tabular_problem(num_prompts=2, group_size=2), optax.sgd(0.1)
    for fields, message, optimizer in (
        ({"optimizer": "lion"}, "optimizer: must be auto", given),
        ({"learning_rate": 0.5}, "learning_rate: has no effect", given),
        ({"max_grad_norm": 7.0}, "max_grad_norm: has no effect", given),
        ({"optimizer_epsilon": 0.5}, "optimizer_epsilon: has no effect", given),
        ({"schedule": "cosine"}, "schedule: has no effect unless decay_iterations", None),
        ({"schedule": "linear"}, "schedule: has no effect unless decay_iterations", given),
        ({"warm_up_iterations": -1}, "warm_up_iterations: must lie in", None),
        ({"optimizer": "muon"}, r"optimizer: must not be muon .*optax\.contrib\.muon", None),
    ):
        with pytest.raises(ConfigError, match=message):
            module.make(module.Config(**fields), problem, optimizer)


def settled(*arguments):
    read = settings.parse_settings(script, [*tiny.CONTROL, *arguments])
    return settings.settle(script, read, script.open_world(read.config)).method


@cases(
    "arguments, length",
    (["--config.schedule=linear"], 100),
    (["--config.schedule=cosine"], 100),
    (["--config.schedule=cosine", "--config.decay_iterations=150"], 150),
    (["--config.schedule=cosine", "--total_steps=0"], 1),
    (["--config.schedule=constant"], 0),
    (["--config.optimizer=lion"], 0),
)
def test_a_schedule_lasts_as_long_as_the_run(arguments, length):
    assert settled(*arguments).decay_iterations == length


@pytest.mark.usefixtures("trace_only")
def test_a_run_has_the_optimizer_of_its_flags(tmp_path, monkeypatch):
    seen = []
    choose = optimizers.choose_optimizer
    monkeypatch.setattr(
        optimizers,
        "choose_optimizer",
        lambda config, *rest: (seen.append(config), choose(config, *rest))[1],
    )
    named = ["--config.optimizer=muon", "--config.schedule=cosine"]
    assert launch.control([*tiny.CONTROL, *named, f"--out={tmp_path / 'run'}"]) == 0
    config = seen[0]
    assert (config.optimizer, config.schedule, config.decay_iterations) == ("muon", "cosine", 100)


ENV = gymnax.make("CartPole-v1")[0]
DENSE = {"torso/Dense_1/kernel"}
GRU = {f"GRUCell_0/{gate}/kernel" for gate in ("ir", "iz", "in", "hr", "hz", "hn")}
LAYER = {"Layer_0/query", "Layer_0/key", "Layer_0/value"}
LAYER |= {f"Layer_0/Dense_{i}/kernel" for i in range(3)}
LAYER |= {f"Layer_0/Gate_{g}/Dense_{i}/kernel" for g in range(2) for i in range(6)}


def taken(problem):
    """Returns a map from a network's role to the paths of the matrices whose momentum Muon
    stores."""
    config = ppo.Config(optimizer="muon")
    optimizer = optimizers.choose_optimizer(config, problem, None, optimizers.adam)
    params = jax.eval_shape(problem.init, jax.random.key(0))[0].without_frozen()
    state = jax.eval_shape(optimizer.init, params)[1].inner_states["muon"].inner_state[0]
    roles = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(state.mu):
        role, _, rest = jax.tree_util.keystr(path, simple=True, separator="/").split("/", 2)
        roles.setdefault(role, set()).add(rest)
    return roles


@cases(
    "network, policy, value",
    ({}, DENSE, DENSE),
    ({"depth": 3, "layer_norm": True}, DENSE | {"torso/Dense_2/kernel"}, None),
    ({"shared_torso": True}, DENSE, set()),
    ({"memory": "gru", "recurrent_networks": "policy"}, DENSE | GRU, DENSE),
    (
        {"memory": "transformer", "memory_layers": 1},
        DENSE | LAYER | {"Dense_0/kernel"},
        DENSE | LAYER | {"Dense_0/kernel"},
    ),
    ids=["mlp", "deep", "shared", "gru", "transformer"],
)
def test_muon_takes_hidden_matrices_of_control(network, policy, value):
    """Muon takes neither the layer that reads the observation nor a head, nor a table of biases."""
    settings = control.NetworkSettings(**network)
    found = taken(control.make_problem(ENV, num_envs=2, num_steps=2, network=settings))
    assert found["policy"] == policy
    assert found.get("value", set()) == (policy if value is None else value)


def test_muon_takes_hidden_matrices_of_groups_and_vines():
    assert taken(control.make_groups(ENV, num_prompts=1, group_size=2)) == {"policy": DENSE}
    vine = control.make_vine(ENV, num_envs=1, num_steps=4, num_states=2)
    assert taken(vine) == {"policy": DENSE}
    spaces = control.adapt(ENV).spaces
    sizes = control.ControlSettings(num_envs=1, num_steps=2)
    recorded = control.recorded_from_settings(spaces, sizes, control.NetworkSettings())
    assert taken(recorded) == {"policy": DENSE, "value": DENSE}


def test_muon_takes_all_convolutions_but_the_first():
    image = gymnax.make("Breakout-MinAtar")[0]
    first = {"torso/Dense_0/kernel"}
    found = taken(control.make_problem(image, num_envs=1, num_steps=1))
    assert found == {"policy": first | DENSE, "value": first | DENSE}
    frames = networks.Torso((8,), observation_rank=3, convolutions=networks.FRAMES)
    policy = networks.Policy(frames, networks.CategoricalHead(2))
    params = jax.eval_shape(policy.init, jax.random.key(0), jnp.zeros((36, 36, 4)))
    marked = jax.tree_util.tree_leaves_with_path(networks.hidden_matrices(policy)(params))
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, on in marked if on]
    convolutions = [f"params/torso/Convolution_{i}/Dense_0/kernel" for i in (1, 2)]
    assert names == [*convolutions, "params/torso/Dense_0/kernel"]


def test_memory_without_torso_reads_the_observation():
    class Cell(NamedTuple):
        start: object
        run: object
        hidden_matrices: object = None

    torso, head = networks.Torso(hidden=()), networks.CategoricalHead(2)
    for memory, first in ((networks.gru, {"ir", "iz", "in"}), (transformer, {"Dense_0"})):
        network = networks.Recurrent(torso, head, 4, memory=memory)
        row = jnp.zeros((1, 1, 4)), jnp.zeros((1, 1), bool)
        params = jax.eval_shape(network.init, jax.random.key(0), network.start(1), *row)
        marked = networks.hidden_matrices(network)(params)["params"]
        cell = marked.get("GRUCell_0", marked)
        assert not any(cell[name]["kernel"] for name in first)
        assert any(jax.tree.leaves(cell))
    unknown = networks.Recurrent(torso, head, 4, memory=lambda *given: Cell(None, None))
    assert networks.hidden_matrices(unknown) is None


@cases("layers", 2, 8, ids=["unrolled", "scanned"])
def test_muon_takes_the_blocks_of_a_transformer(layers):
    task = language.tasks.addition(1)
    shape = language.ModelSettings(width=8, layers=layers, heads=2, kv_heads=1, mlp_width=8)
    model, critic = (shape.build(task.tokenizer.size, outputs=n) for n in (0, 1))
    kernels = {
        *(f"blocks/attention/{name}/kernel" for name in ("query", "key", "value", "out")),
        *(f"blocks/mlp/{name}/kernel" for name in ("gate", "up", "down")),
    }
    sizes = {"num_prompts": 2, "group_size": 1}
    problem = language.make_problem(task, model, critic=critic, **sizes)
    assert taken(problem) == {"policy": kernels, "value": kernels}
    assert taken(language.make_problem(task, model, **sizes)) == {"policy": kernels}
    params = jax.eval_shape(problem.init, jax.random.key(0))[0].without_frozen()
    axes = optimizers.matrices(problem)(params).policy["params"]["blocks"]["mlp"]["up"]["kernel"]
    assert tuple(axes) == (1, 2)

    adapted = model.clone(lora=Lora(2, targets=("up",)))
    base = jax.tree.map(lambda x: jnp.zeros(x.shape), model.parameter_shapes())
    factors = {f"blocks/mlp/up/{name}" for name in "ab"}
    found = taken(language.make_problem(task, adapted, initial=base, **sizes))
    assert found == {"policy": factors}


class Own(nn.Module):
    """A user's policy, critic or both in one module."""

    outputs: str

    @nn.compact
    def __call__(self, x):
        logits, value = nn.Dense(2)(nn.Dense(4)(x)), nn.Dense(1)(x)[..., 0]
        policy = Categorical(logits)
        return {"policy": policy, "critic": value, "actor_critic": (policy, value)}[self.outputs]


class OwnTorso(networks.Torso):
    """A user's hidden layers."""


class OwnModel(language.Transformer):
    """A user's transformer module."""


@cases("role", "policy", "critic", "actor_critic", "torso", "model")
def test_muon_refuses_networks_of_a_user(role):
    """An optax transformation makes `make` succeed, as the message states."""
    if role == "model":
        task = language.tasks.addition(1)
        model = OwnModel(task.tokenizer.size, width=8, layers=1, heads=2)
        problem, module = language.make_problem(task, model, num_prompts=2, group_size=2), grpo
    else:
        policy = networks.Policy(OwnTorso(), networks.CategoricalHead(2))
        given = {"policy": policy} if role == "torso" else {role: Own(role)}
        problem, module = control.make_problem(ENV, num_envs=2, num_steps=2, **given), ppo
    message = (
        r"optimizer: must not be muon .*make\(optimizer=optax\.contrib\.muon\(.*dimension_numbers"
    )
    with pytest.raises(ConfigError, match=message):
        module.make(module.Config(optimizer="muon"), problem)
    module.make(module.Config(optimizer="lion"), problem)
    module.make(module.Config(), problem, optax.contrib.muon(1e-3))


def test_reinforce_schedule_leaves_the_critic_alone():
    """Warm-up and decay do not change the critic's own step size."""
    problem = tabular_problem(num_prompts=4)
    config = reinforce.Config(decay_iterations=4, schedule="cosine", value_minibatches=1)
    learner = reinforce.make(config, problem)
    state = learner.init(jax.random.key(0))
    after, _ = jax.jit(learner.step)(state._replace(step=jnp.int32(4)))
    chex.assert_trees_all_equal(after.params.policy, state.params.policy)
    assert np.any(np.asarray(after.params.value) != np.asarray(state.params.value))
