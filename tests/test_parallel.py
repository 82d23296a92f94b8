"""Tests the placement of seeds and rows on devices.

The module test_algorithms.py checks that placement does not change the numbers.
"""

import functools

import gymnax
import jax
import pytest
from tables import cases

from jaxrl_po import control
from jaxrl_po.algorithms import ppo
from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement


@cases(
    "devices, num_seeds, num_rows, want",
    (1, 3, 5, Placement(3, 1, 1)),
    (4, 8, 64, Placement(8, 4, 1)),  # seeds are placed before rows: seeds need no communication
    (4, 1, 64, Placement(1, 1, 4)),
    (8, 3, 16, Placement(3, 1, 8)),
    ("2", 2, 2, Placement(2, 2, 1)),
)
def test_choice(devices, num_seeds, num_rows, want):
    assert parallel.choose(devices, num_seeds=num_seeds, num_rows=num_rows) == want


def test_auto_takes_what_divides():
    placement = parallel.choose("auto", num_seeds=6, num_rows=8 * parallel.MIN_ROWS)
    assert placement.num_devices == 8  # rows divide by 8 where the number of seeds does not
    # Too few rows do not justify an all-reduce of gradients, but an explicit request is met.
    assert parallel.choose("auto", num_seeds=1, num_rows=8).num_devices == 1
    assert parallel.choose(8, num_seeds=1, num_rows=8).num_devices == 8
    assert parallel.choose("auto", num_seeds=7, num_rows=5).num_devices == 7


@cases(
    "mesh, want",
    ("seed:2,data:4", Placement(4, 2, 4)),
    ("data:8", Placement(4, 1, 8)),
    ("seed:4", Placement(4, 4, 1)),
    ("data:2,model:4", Placement(4, 1, 2, 4)),
)
def test_a_mesh_says_it_by_hand(mesh, want):
    assert parallel.choose("auto", num_seeds=4, num_rows=64, mesh=mesh) == want
    assert parallel.choose(want.num_devices, num_seeds=4, num_rows=64, mesh=mesh) == want


@cases(
    "mesh, devices, match",
    ("seed:2,data:4", 4, "has 8 devices, but devices = 4"),
    ("seed:2,rows:4", "auto", "must read like"),
    ("seed:0", "auto", "must read like"),
    ("seed:two", "auto", "must read like"),
    ("seed:2,seed:4", "auto", "must read like .* each axis once, with counts of at least 1"),
    ("seed:4,data:4", "auto", "needs 16 devices"),
    ("seed:3", "auto", "seed:3 must divide the 4 seeds"),
    ("data:7", "auto", "data:7 must divide the 64 rows"),
)
def test_bad_meshes_are_named(mesh, devices, match):
    with pytest.raises(ConfigError, match=match):
        parallel.choose(devices, num_seeds=4, num_rows=64, mesh=mesh)


def test_parameters_are_cut_over_rows_rather_than_seeds():
    choose = functools.partial(parallel.choose, num_seeds=4, num_rows=64, shard_params=True)
    assert choose(4) == Placement(4, 1, 4, shard_params=True)
    assert choose(1) == Placement(4, 1, 1, shard_params=True)
    assert choose("auto", mesh="seed:2,data:2") == Placement(4, 2, 2, shard_params=True)
    with pytest.raises(ConfigError, match="must divide"):
        choose(5)


def test_parameter_sharding_leaves_device_axis_to_the_compiler():
    assert Placement(1, 1, 4).axis_name == "data"
    for placement in (Placement(1, 1, 4, shard_params=True), Placement(1, 1, 4, 2)):
        assert placement.cuts_params
        assert placement.axis_name is None
    assert not Placement(2, 2, 4).cuts_params


def test_description_says_what_lies_where():
    assert "1 device" in Placement(3, 1, 1).describe()
    assert "4 on each" in Placement(8, 2, 1).describe()
    assert "sharded over 4" in Placement(1, 1, 4).describe()
    assert (
        "2 shares of 3, the rows of each sharded over 4 devices, 8 in all"
        in Placement(6, 2, 4).describe()
    )
    assert (
        "8 devices (seed 1 × data 4 × model 2), parameters sharded over model"
        in Placement(2, 1, 4, 2).describe()
    )
    assert (
        "parameters sharded over data and model"
        in Placement(2, 1, 4, 2, shard_params=True).describe()
    )


def test_state_lies_where_the_placement_says():
    placement = Placement(2, 2, 2)
    problem = control.make_problem(
        gymnax.make("CartPole-v1")[0], num_envs=8, num_steps=4, axis_name=placement.axis_name
    )
    learner = parallel.over_devices(
        ppo.make(ppo.Config(axis_name=placement.axis_name, num_minibatches=1), problem), placement
    )
    state = jax.jit(learner.init)(jax.random.split(jax.random.key(0), 2))
    observation, kernel = (
        state.collector.sharded["environments"].observation,
        jax.tree.leaves(state.params)[0],
    )
    assert observation.sharding.shard_shape(observation.shape) == (1, 4, 4)
    assert kernel.sharding.shard_shape(kernel.shape)[0] == 1
    assert len(kernel.sharding.device_set) == 4


def test_processes_share_the_devices_evenly():
    with pytest.raises(ConfigError, match=r"^devices: must be a multiple of the 2 proces.* got 3"):
        parallel.choose(3, num_seeds=3, num_rows=64, num_processes=2)


def test_several_processes_use_all_devices(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    sizes = {"num_seeds": 2, "num_rows": 8, "num_processes": 2}
    assert parallel.choose("auto", mesh="seed:2,data:4", **sizes).num_devices == 8
    with pytest.raises(
        ConfigError,
        match=r"^devices: must be all 8 of the 2 processes, got 6: let them divide the 6 seeds",
    ):
        parallel.choose("auto", num_seeds=6, num_rows=5, num_processes=2)


@cases("error", RuntimeError("Unable to initialize"), AssertionError())
def test_a_backend_that_is_not_there_is_named(monkeypatch, error):
    def count():
        raise error

    monkeypatch.setattr(jax, "device_count", count)
    with pytest.raises(
        ConfigError, match=r"^devices: JAX_PLATFORMS = .* must name backends that are .*: \w"
    ):
        parallel.choose("auto", num_seeds=1, num_rows=1)


def test_cores_are_devices_if_jax_started_with_one(monkeypatch):
    monkeypatch.setattr(parallel, "_available", lambda *given, **named: 1)
    monkeypatch.setattr(parallel.backend, "cores", lambda: 3)
    assert [len(parallel.core_devices("auto", seeds)) for seeds in (4, 5, 3)] == [2, 0, 3]
    assert (
        len({device.client for device in parallel.core_devices(3, 3)} - {jax.devices()[0].client})
        == 1
    )


def test_devices_that_do_not_divide_seeds_compute_copies():
    assert Placement(12, 4, 1).of_seeds(6) == Placement(6, 2, 2)
    assert Placement(12, 4, 1).of_seeds(12) == Placement(12, 4, 1)
