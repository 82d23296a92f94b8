"""Wrong programs of empty minibatches, Flax collections, and what is no network."""

from wrong import Wrong

EMPTY, COLLECTIONS = "test_empty_minibatches.py", "test_collections.py"
HANDED_ON = f"{COLLECTIONS}::test_constants_are_handed_on_by_every_update"
SAVED = f"{COLLECTIONS}::test_constants_are_saved_and_differ_by_seed"
NETWORKS, LANGUAGE = "test_own_networks.py::", "test_language_problem.py::"
COMMAND = f"{COLLECTIONS}::test_a_run_of_the_command_carries_constants"

WRONG = [
    Wrong(
        "a minibatch whose masked rows are counted is not empty",
        "updates",
        "nonempty = (sum(counts) > 0) & (unmasked > 0)",
        "nonempty = sum(counts) > 0",
        (
            f"{EMPTY}::test_nothing_scored_moves_nothing[dr_grpo]",
            "test_updates.py::test_minibatches_are_empty_by_their_mask[1]",
        ),
    ),
    Wrong(
        "each device decides whether a minibatch is empty",
        "updates",
        "counts, unmasked = masked.psum(jax.vmap(measure, axis_size=steps)(orders), axis_name)",
        "counts, unmasked = jax.vmap(measure, axis_size=steps)(orders)\n"
        "        counts = masked.psum(counts, axis_name)",
        ("test_updates.py::test_devices_agree_whether_a_minibatch_is_empty[1]",),
    ),
    Wrong(
        "a batch that measures no KL lowers its weight",
        "algorithms.ppo_penalty",
        "return jnp.where(kl.count > 0, adapted, beta)",
        "return adapted",
        (f"{EMPTY}::test_nothing_scored_moves_nothing[ppo_penalty]",),
    ),
    Wrong(
        "ties move a reward model by momentum",
        "language.reward_model",
        "jnp.where(some, new, old)",
        "new",
        ("test_reward_model.py::test_ties_do_not_move_a_fit",),
    ),
    Wrong(
        "the optimizer has moments of constants",
        "types",
        "return self._replace(frozen=None, constants=None)",
        "return self._replace(frozen=None)",
        (f"{HANDED_ON}[ppo]",),
    ),
    Wrong(
        "every collection is trained",
        "variables",
        "if not is_flax(module) or variables.keys() <= set(TRAINED):",
        "if True:",
        (f"{HANDED_ON}[trpo]", f"{HANDED_ON}[grpo_language]"),
    ),
    Wrong(
        "what a module sows is a constant",
        "variables",
        "(*TRAINED, SOWN)",
        "TRAINED",
        (f"{COLLECTIONS}::test_what_a_module_sows_is_no_constant",),
    ),
    Wrong(
        "checkpoints lack constants",
        "run.loop.runner",
        "self.latest.save(self.iteration, self.state.with_frozen(None)",
        "self.latest.save(self.iteration, self.state._replace("
        "params=self.state.params.without_frozen())",
        (SAVED,),
    ),
    Wrong(
        "all seeds share the constants of one",
        "run.devices.seeds",
        "ActorCritic(0, 0, None, 0)",
        "ActorCritic(0, 0, None)",
        (SAVED,),
    ),
    Wrong(
        "training from a run begins with other constants",
        "run.experiment.earlier",
        "saved.params._replace(frozen=params.frozen) if same_critic",
        "saved.params._replace(frozen=params.frozen, constants=params.constants) if same_critic",
        (COMMAND,),
    ),
    Wrong(
        "errors of a module that writes or draws are Flax's own",
        "variables",
        "if type(error).__name__ not in REFUSED:",
        "if True:",
        (f"{COLLECTIONS}::test_modules_that_write_or_draw_are_refused",),
    ),
    Wrong(
        "a class of a network has init and apply",
        "variables",
        "if not bound or not all(hasattr(module, each) for each in needed):",
        "if not all(hasattr(module, each) for each in needed):",
        (f"{NETWORKS}test_networks_that_are_no_modules_are_named[the class Layered]",),
    ),
    Wrong(
        "a part of nnx stays as it was drawn",
        "variables",
        'require_module(f"{name}.{field}", part)',
        "pass",
        (f"{NETWORKS}test_parts_that_would_not_be_trained_are_named",),
    ),
    Wrong(
        "fields of another's modules are refused",
        "variables",
        'if not type(module).__module__.startswith(("jaxrl_po.", "flax.linen")):',
        "if False:",
        (f"{NETWORKS}test_modules_and_wrappers_stay_accepted",),
    ),
    Wrong(
        "a network is used before it is looked at",
        "control.actor",
        "variables.require_module(name, module)",
        "pass",
        (f"{NETWORKS}test_networks_that_are_no_modules_are_named",),
    ),
    Wrong(
        "a model is asked for its vocabulary before it is looked at",
        "language.checks",
        'variables.require_module(name, model, "vocabulary")',
        "pass",
        (f"{LANGUAGE}test_models_that_are_no_modules_are_named",),
    ),
    Wrong(
        "a cell of Flax is called as a memory",
        "control.networks",
        "if callable(make) and not is_flax(make):",
        "if callable(make):",
        (f"{NETWORKS}test_memories_must_be_functions_that_make_one",),
    ),
    Wrong(
        "a module may stand for settings of networks",
        "control.modules",
        "if network is not None and not isinstance(network, NetworkSettings):",
        "if False:",
        (f"{NETWORKS}test_settings_of_networks_are_no_network",),
    ),
    Wrong(
        "a class of nnx in a file lacks an argument",
        "run.experiment.user_code",
        "if advice and isinstance(error, TypeError)",
        "if False",
        (f"{NETWORKS}test_nnx_in_files_and_experiments_is_named",),
    ),
]
