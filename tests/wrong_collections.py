"""Planted mistakes in empty minibatches, Flax collections, and objects that are not networks."""

from wrong import Wrong, table

NETWORKS, LANGUAGE = "test_own_networks.py::", "test_language_problem.py::"

TEXT = """
a minibatch whose masked rows are counted is not empty
  updates:
    test_empty_minibatches.py::test_nothing_scored_moves_nothing[dr_grpo]
    test_updates.py::test_minibatches_are_empty_by_their_mask[1]
  - nonempty = (sum(counts) > 0) & (unmasked > 0)
  + nonempty = sum(counts) > 0
each device decides whether a minibatch is empty
  updates: test_updates.py::test_devices_agree_whether_a_minibatch_is_empty[1]
  - counts, unmasked = masked.psum(jax.vmap(measure, axis_size=steps)(orders), axis_name)
  + counts, unmasked = jax.vmap(measure, axis_size=steps)(orders)
  +         counts = masked.psum(counts, axis_name)
a batch that measures no KL lowers its weight
  algorithms.ppo_penalty: test_empty_minibatches.py::test_nothing_scored_moves_nothing[ppo_penalty]
  - return jnp.where(kl.count > 0, adapted, beta)
  + return adapted
ties move a reward model by momentum
  language.reward_model: test_reward_model.py::test_ties_do_not_move_a_fit
  - jnp.where(some, new, old)
  + new
the optimizer has moments of constants
  types: test_collections.py::test_constants_are_handed_on_by_every_update[ppo]
  - return self._replace(frozen=None, constants=None)
  + return self._replace(frozen=None)
every collection is trained
  variables:
    test_collections.py::test_constants_are_handed_on_by_every_update[trpo]
    test_collections.py::test_constants_are_handed_on_by_every_update[grpo_language]
  - if not is_flax(module) or variables.keys() <= set(TRAINED):
  + if True:
what a module sows is a constant
  variables: test_collections.py::test_what_a_module_sows_is_no_constant
  - (*TRAINED, SOWN)
  + TRAINED
checkpoints lack constants
  run.loop.runner: test_collections.py::test_constants_are_saved_and_differ_by_seed
  - self.latest.save(self.iteration, self.state.with_frozen(None)
  + self.latest.save(self.iteration, self.state._replace(params=self.state.params.without_frozen())
all seeds share the constants of one
  run.devices.seeds: test_collections.py::test_constants_are_saved_and_differ_by_seed
  - ActorCritic(0, 0, None, 0)
  + ActorCritic(0, 0, None)
training from a run begins with other constants
  run.experiment.earlier: test_collections.py::test_a_run_of_the_command_carries_constants
  - saved.params._replace(frozen=params.frozen) if same_critic
  + saved.params._replace(frozen=params.frozen, constants=params.constants) if same_critic
errors of a module that writes or draws are Flax's own
  variables: test_collections.py::test_modules_that_write_or_draw_are_refused
  - if type(error).__name__ not in REFUSED:
  + if True:
a part of nnx stays as it was drawn
  variables: test_own_networks.py::test_parts_that_would_not_be_trained_are_named
  - require_module(f"{name}.{field}", part)
  + pass
fields of another's modules are refused
  variables: test_own_networks.py::test_modules_and_wrappers_stay_accepted
  - if not type(module).__module__.startswith(("jaxrl_po.", "flax.linen")):
  + if False:
a network is used before it is looked at
  control.actor: test_own_networks.py::test_networks_that_are_no_modules_are_named
  - variables.require_module(name, module)
  + pass
a model is asked for its vocabulary before it is looked at
  language.checks: test_language_problem.py::test_models_that_are_no_modules_are_named
  - variables.require_module(name, model, "vocabulary")
  + pass
a cell of Flax is called as a memory
  control.networks: test_own_networks.py::test_memories_must_be_functions_that_make_one
  - if callable(make) and not is_flax(make):
  + if callable(make):
a module may stand for settings of networks
  control.modules: test_own_networks.py::test_settings_of_networks_are_no_network
  - if network is not None and not isinstance(network, NetworkSettings):
  + if False:
a class of nnx in a file lacks an argument
  run.experiment.user_code: test_own_networks.py::test_nnx_in_files_and_experiments_is_named
  - if advice and isinstance(error, TypeError)
  + if False
"""
WRONG = [
    *table(TEXT),
    Wrong(
        "a class of a network has init and apply",
        "variables",
        "if not bound or not all(hasattr(module, each) for each in needed):",
        "if not all(hasattr(module, each) for each in needed):",
        (f"{NETWORKS}test_networks_that_are_no_modules_are_named[the class Layered]",),
    ),
]
