"""Default flags of `jaxrl-po language` that suit small transformers, by method and start."""

from collections.abc import Mapping
from typing import Any

from jaxrl_po.algorithms import dapo
from jaxrl_po.algorithms.actor_critic import GAE, Epochs
from jaxrl_po.run.experiment import methods, models, rewarding
from jaxrl_po.run.experiment.language_config import MODEL, RANDOM, LanguageOptions
from jaxrl_po.run.experiment.settings import DECAY, WARM_UP

# Few epochs over large batches keep a small model stable.
SMALL = {
    "total_steps": 131_072,
    "seeds": 4,
    "model.mlp_width": 128,
    "warm_start.steps": 10_000,
    "warm_start.accuracy": 0.5,
}
# Each setting applies to every method with a critic that has the field.
WITH_CRITIC: dict[str, Any] = {
    # A completion is an episode with its reward at the end, so nothing is discounted.
    "config.gamma": 1.0,
    "problem.num_prompts": 256,
    "problem.group_size": 1,
    # An underfitted critic halves the gain of a natural-gradient step: fit it well, and subsample
    # the rows of the Fisher products.
    "config.value_epochs": 4,
    "config.value_minibatches": 8,
    "config.value_learning_rate": 3e-3,
    "config.fisher_stride": 2,
    # A mean over many tokens has small gradients: an ε of 1e-5 would shorten the first steps.
    "config.learning_rate": 1e-3,
    "config.optimizer_epsilon": 1e-8,
    "config.max_grad_norm": 1.0,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
}
# Settings of single methods.
OWN: dict[str, dict[str, Any]] = {
    "a2c": {"config.estimator": "monte_carlo"},
    "trpo": {"config.max_kl": 0.02},
}
# Four small steps per batch of 512: with 128 completions and an entropy bonus, most seeds forgot
# what the warm start had taught them.
IN_GROUPS = {
    "total_steps": 204_800,
    "config.learning_rate": 1e-3,
    WARM_UP: 30,
    DECAY: 400,
    "config.entropy_coefficient": 0.0,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
    "problem.num_prompts": 64,
    "problem.group_size": 8,
}


FITTED: dict[str, Any] = {"seeds": 1, WARM_UP: 100, DECAY: 400}
# Their surrogates are not clipped, so they are valid only near the old policy.
UNCLIPPED = ("rloo", "pkpo", "distillation")
# A pretrained model forgets at the step sizes of a new one.
PRETRAINED: dict[str, Any] = {"config.learning_rate": 1e-5, "seeds": 1, "config.num_epochs": 1}
# Adapters begin at zero, and their base is the reference that they cannot forget.
ADAPTED = {**PRETRAINED, "config.learning_rate": 5e-4, "config.use_reference": False}
# A reward model is reliable only near the initial policy, whose samples it was fitted on; hence the
# KL penalty to that policy in methods of several epochs.
JUDGED = {"reward_model.width": 32, "reward_model.mlp_width": 64}
REFERRED = {"reference.enabled": True}


def of_pretrained(options: LanguageOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Default values of flags that suit a pretrained model, or adapters of one; else none."""
    published = given.get("model.shape", "none") != "none"
    if not (published or models.root(options.init_from)):
        return {}
    return applicable(options, ADAPTED if given.get("lora.rank") else PRETRAINED)


def applicable(options: LanguageOptions, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings without those of fields that the method's Config lacks."""
    fields = methods.ALGORITHMS[options.algorithm].Config.__dataclass_fields__
    return {
        name: value
        for name, value in settings.items()
        if not name.startswith("config.") or name.removeprefix("config.") in fields
    }


def of_language(options: LanguageOptions, given: Mapping[str, Any]) -> dict[str, Any]:
    """Default values of flags that suit small transformers."""
    small: dict[str, Any] = dict(SMALL)
    if options.init_from or options.task == RANDOM:
        small = {name: value for name, value in small.items() if not name.startswith("warm_start.")}
    if options.reward == MODEL:
        small |= JUDGED
    gentle = of_pretrained(options, given)
    if options.algorithm in methods.WITH_CRITIC:
        config = methods.WITH_CRITIC[options.algorithm].Config
        if config.estimator == GAE:
            small["config.lambda_"] = 1.0
        if options.reward == MODEL and issubclass(config, Epochs):
            small |= REFERRED
        own = OWN.get(options.algorithm, {})
        return small | applicable(options, WITH_CRITIC) | own | gentle
    if options.algorithm in methods.SUPERVISED:
        return small | FITTED | gentle
    if options.algorithm == "dapo" and (options.tools or rewarding.functions(options)):
        # A refill needs the scores inside the program.
        small |= {"config.dynamic_sampling": dapo.REWEIGHT}
    once = {"config.num_epochs": 1} if options.algorithm in UNCLIPPED else {}
    return small | IN_GROUPS | once | gentle
