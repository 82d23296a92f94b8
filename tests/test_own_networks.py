"""Tests networks from flags, and user-defined Flax modules: accepted and refused networks."""

import collections

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from probes import MatchCueContinuous
from structured import Structured, TwoChoices, problem_of
from tables import cases

from jaxrl_po import control
from jaxrl_po import run as runs
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.control import networks
from jaxrl_po.distributions import Categorical
from jaxrl_po.run.errors import UserCodeError
from jaxrl_po.run.experiment import control as command


@cases(
    "env, network, message",
    (
        "CartPole-v1",
        {"tanh_squash": True},
        "tanh_squash: applies to continuous actions only; this environment's are discrete",
    ),
    (
        "CartPole-v1",
        {"state_dependent_std": True},
        "state_dependent_std: applies to continuous actions only",
    ),
    ("CartPole-v1", {"shared_torso": True, "memory": "gru"}, "shared_torso: must be off"),
    ("CartPole-v1", {"shared_torso": True, "critic_width": 8}, "critic_width: must be 0"),
    ("CartPole-v1", {"channels": 3}, r"channels: .* this environment's observations are \[4\]"),
    ("CartPole-v1", {"memory": "lstm"}, "memory: must be one of"),
)
def test_networks_that_cannot_work_are_named(env, network, message):
    with pytest.raises(ConfigError, match=message):
        problem_of(gymnax.make(env)[0], control.NetworkSettings(**network))


def test_shared_body_is_refused_if_critic_sees_more():
    with pytest.raises(ConfigError, match="shared_torso: must be off where the critic sees more"):
        problem_of(Structured(), control.NetworkSettings(shared_torso=True))


def init(env, network):
    """Returns the parameters, without the initial states of the environments."""
    problem = problem_of(env, network)
    return jax.jit(lambda key: problem.init(key)[0])(jax.random.key(0))


def test_critic_may_be_wider_with_layer_norm():
    network = control.NetworkSettings(width=8, critic_width=16, layer_norm=True)
    params = jax.eval_shape(lambda: init(gymnax.make("CartPole-v1")[0], network))
    policy, value = (p["params"]["torso"] for p in (params.policy, params.value))
    assert policy["Dense_0"]["kernel"].shape == (4, 8)
    assert value["Dense_0"]["kernel"].shape == (4, 16)
    assert policy["LayerNorm_0"]["scale"].shape == (8,)


@cases(
    "env, network",
    ("CartPole-v1", {"shared_torso": True}),
    ("CartPole-v1", {"memory": "gru"}),
    ("Pendulum-v1", {"state_dependent_std": True}),
    ("Breakout-MinAtar", {"width": 16}),
    (TwoChoices(), {}),
)
def test_the_initialisation_is_that_of_every_layer(env, network):
    def singular_values(initialization):
        """Returns the singular values of each kernel."""
        settings = control.NetworkSettings(**network, initialization=initialization)
        made = gymnax.make(env)[0] if isinstance(env, str) else env
        params = init(made, settings)
        kernels = [
            np.linalg.svd(np.asarray(x).reshape(-1, x.shape[-1]), compute_uv=False)
            for path, x in jax.tree_util.tree_leaves_with_path(params)
            if path[-1].key == "kernel"
        ]
        assert len(kernels) >= 4
        return kernels

    def orthogonal(values):
        return any(np.allclose(values, scale, rtol=1e-3) for scale in (0.01, 1.0, np.sqrt(2.0)))

    assert all(orthogonal(each) for each in singular_values("orthogonal"))
    lecun = singular_values("lecun_normal")
    assert not any(orthogonal(each) for each in lecun)
    # The output of the policy no longer starts near 0.
    assert min(each.max() for each in lecun) > 0.5


OWN = """
import flax.linen as nn
from jaxrl_po.control.networks import Critic, CategoricalHead, Policy, Torso

class Three(nn.Module):
    @nn.compact
    def __call__(self, x):
        return CategoricalHead(3)(x)

def actor():
    return Policy(Torso((5,)), CategoricalHead(2))

def critic():
    return Critic(Torso((6,)))
"""


@pytest.mark.usefixtures("trace_only")
def test_networks_of_ones_own_come_from_a_file(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    arguments = [
        "--problem.num_envs=4",
        "--problem.num_steps=8",
        "--total_steps=32",
        "--seeds=1",
        "--eval_episodes=2",
        f"--policy={tmp_path}/own.py:actor",
    ]
    out = tmp_path / "run"
    critic = f"--critic={tmp_path}/own.py:critic"
    assert launch.control([*arguments, critic, f"--out={out}", "--config.num_minibatches=2"]) == 0
    policy = runs.load(out)
    assert policy.params.policy["params"]["torso"]["Dense_0"]["kernel"].shape == (4, 5)
    assert policy.params.value["params"]["torso"]["Dense_0"]["kernel"].shape == (4, 6)
    assert int(policy.act(jnp.zeros(4))) in (0, 1)
    for flags, message in (
        ([critic, "--network.width=8"], "width: has no effect"),
        ([critic, "--algorithm=grpo"], "critic: must be left out"),
        (["--policy=mlp"], "policy: must be a file and a name, file.py:name, got 'mlp'"),
        ([f"--policy={tmp_path}/own.py:Three"], r"one of 2 options.*a Categorical over 3 options"),
        ([f"--policy={tmp_path}/own.py:Four"], "policy.*Four"),
    ):
        with pytest.raises(ConfigError, match=message):
            launch.control([*arguments, *flags, f"--out={tmp_path / 'other'}"])
    assert not (tmp_path / "other").exists()


@cases(
    "given, settings, message",
    ("policy", {"tanh_squash": True}, "tanh_squash: has no effect unless the policy is made here"),
    ("policy", {"initial_log_std": 1.0}, "initial_log_std: has no effect unless the policy"),
    ("critic", {"critic_width": 7}, "critic_width: has no effect unless the critic is made"),
    ("critic", {"shared_torso": True}, "shared_torso: has no effect unless the critic"),
)
def test_settings_for_which_a_module_stands_are_refused(given, settings, message):
    module = {
        "policy": networks.Policy(networks.Torso((4,)), networks.GaussianHead(1)),
        "critic": networks.Critic(networks.Torso((4,))),
    }[given]
    with pytest.raises(ConfigError, match=message):
        control.make_problem(
            MatchCueContinuous(), network=control.NetworkSettings(**settings), **{given: module}
        )


def test_own_networks_drop_settings_tuned_for_others(tmp_path):
    options = command.ControlOptions(env="Breakout-MinAtar")
    assert any(name.startswith("network.") for name in command.tuned(options))
    own = command.ControlOptions(env="Breakout-MinAtar", policy="own.py:actor")
    assert command.tuned(own)
    assert not any(name.startswith("network.") for name in command.tuned(own))
    shared = command.tuned(options, {"network.shared_torso": True})
    assert not any(name.startswith("network.") for name in shared)


@cases(
    "env, head, message",
    (Structured(), networks.CategoricalHead(3), r"each of the 4 flags .*over 3 options"),
    (TwoChoices(), networks.CategoricalHead(2), "one of 2 and one of 3 options"),
    (TwoChoices(), networks.MultiCategoricalHead((3, 2)), "over 3 and 2 options"),
    (MatchCueContinuous(), networks.GaussianHead(2), "1 continuous components, .* got a Diag"),
    (MatchCueContinuous(), networks.CategoricalHead(1), "1 continuous components"),
)
def test_a_policy_must_fit_the_actions(env, head, message):
    class Last(nn.Module):
        inner: nn.Module

        def __call__(self, x):
            return self.inner(jax.tree.leaves(x)[-1])

    with pytest.raises(ConfigError, match=message):
        control.make_problem(env, policy=Last(head))


class Rewritten(nnx.Module):
    """Policy that is written in nnx."""

    def __init__(self, rngs):
        self.layer = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        return Categorical(self.layer(x))


class Wrapper:
    """Network that is not a Flax module."""

    def init(self, key, x):
        return {"params": {"w": jnp.zeros((x.shape[-1], 2))}}

    def apply(self, variables, x):
        return Categorical(x @ variables["params"]["w"])


class Layered(nn.Module):
    """Module with a class as a field, as Flax allows it."""

    layer: type = nn.Dense
    inner: object = None

    @nn.compact
    def __call__(self, x):
        return Categorical(self.layer(2)(x))


class Static:
    """Namespace that has static functions."""

    @staticmethod
    def init(key, x):
        return Wrapper().init(key, x)

    @staticmethod
    def apply(params, x):
        return Wrapper().apply(params, x)


CART_POLE = gymnax.make("CartPole-v1")[0]
TORSO, HEAD = networks.Torso((4,)), networks.CategoricalHead(2)
NNX = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
MISTAKEN = {
    "the class Layered": Layered,
    "the class Rewritten": Rewritten,
    "the class Wrapper": Wrapper,
    "the nnx module Linear": NNX,
    "function": lambda x: Categorical(x),
    "tuple": (Wrapper().init, Wrapper().apply),
}


@pytest.mark.parametrize("got", MISTAKEN)
def test_networks_that_are_no_modules_are_named(got):
    sizes = {"num_envs": 2, "num_steps": 2}
    spaces = control.adapt(CART_POLE).spaces
    makes = {
        "policy": (
            lambda x: control.make_problem(CART_POLE, policy=x),
            lambda x: control.make_groups(CART_POLE, policy=x),
            lambda x: control.make_vine(CART_POLE, policy=x),
            lambda x: control.recorded_from_settings(
                spaces, control.ControlSettings(**sizes), policy=x
            ),
        ),
        "critic": (
            lambda x: control.make_problem(CART_POLE, critic=x),
            lambda x: control.make_groups(CART_POLE, critic=x),
        ),
        "actor_critic": (lambda x: control.make_problem(CART_POLE, actor_critic=x),),
    }
    for role, factories in makes.items():
        for make in factories:
            message = f"^{role}: must be an instance of flax.linen.Module.* got {got}: .*ToLinen"
            with pytest.raises(ConfigError, match=message):
                make(MISTAKEN[got])


@cases(
    "policy, name",
    (networks.Policy(NNX, HEAD), r"policy.torso: .* the nnx module Linear"),
    (networks.Policy(TORSO, networks.CategoricalHead), "policy.head: .* the class Categorical"),
    (networks.Policy(networks.SideBySide([TORSO, NNX], TORSO), HEAD), "policy.torso.parts"),
    (networks.Recurrent(nn.Sequential([NNX]), HEAD, 4), "policy.torso.layers"),
)
def test_parts_that_would_not_be_trained_are_named(policy, name):
    with pytest.raises(ConfigError, match=f"^{name}.*ToLinen"):
        control.make_problem(CART_POLE, policy=policy)


@cases(
    "memory",
    nn.GRUCell,
    nn.GRUCell(4),
    nnx.GRUCell(4, 4, rngs=nnx.Rngs(0)),
    networks.gru(4, networks.orthogonal),
    lambda *_: nn.GRUCell(4),
)
def test_memories_must_be_functions_that_make_one(memory):
    policy = networks.Recurrent(TORSO, HEAD, 4, memory=memory)
    with pytest.raises(ConfigError, match=r"^memory: must be a function .*ToLinen"):
        control.make_problem(CART_POLE, policy=policy)


@cases("network", control.NetworkSettings, Layered(), {"width": 8})
def test_settings_of_networks_are_no_network(network):
    for make in (control.make_problem, control.make_groups, control.make_vine):
        with pytest.raises(ConfigError, match=r"network: must be a control.NetworkSettings, got"):
            make(CART_POLE, network=network)


@cases(
    "policy",
    Wrapper(),
    collections.namedtuple("Pair", "init apply")(Wrapper().init, Wrapper().apply),
    Layered(inner={"a": nn.Dense(3)}),
    networks.Policy(lambda x: x, HEAD),
    nnx.bridge.ToLinen(Rewritten, args=()),
    Layered(inner=[NNX]),  # a user's module may contain a frozen part
    Static,
)
def test_modules_and_wrappers_stay_accepted(policy):
    problem = control.make_problem(CART_POLE, policy=policy, num_envs=2, num_steps=2)
    params = jax.eval_shape(lambda: problem.init(jax.random.key(0))[0].policy["params"])
    assert sum(x.ndim == 2 for x in jax.tree.leaves(params)) == 1


NETWORKS_OF_NNX = """
from flax import nnx

class Net(nnx.Module):
    def __init__(self, size):
        self.size = size

def made():
    return Net(3)
"""


def test_nnx_in_files_and_experiments_is_named(tmp_path):
    (tmp_path / "own.py").write_text(NETWORKS_OF_NNX)
    for name, got in (("made", "got the nnx module Net"), ("Net", "'size'")):
        for role in ("policy", "critic"):
            message = rf"^{role}: \S+own.py:{name}:? .*{got}.*ToLinen"
            with pytest.raises(UserCodeError, match=message):
                launch.control([f"--{role}={tmp_path}/own.py:{name}", f"--out={tmp_path / 'run'}"])
    for given in (NNX, Rewritten, lambda x: x):
        experiment = runs.Experiment(env="CartPole-v1", policy=given, out=str(tmp_path / "run"))
        with pytest.raises(ConfigError, match=r"^policy\S* .*ToLinen"):
            runs.train(experiment)
    assert not (tmp_path / "run").exists()
