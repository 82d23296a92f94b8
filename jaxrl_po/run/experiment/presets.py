"""Default flags of `jaxrl-po language` that suit small transformers, by method and start."""

from collections.abc import Mapping
from typing import Any

from jaxrl_po.algorithms import dapo
from jaxrl_po.run.experiment import methods, models, plan, rewarding, tasks
from jaxrl_po.run.experiment.rewarding import MODEL

# Few epochs over large batches keep a small model stable.
SMALL = {
    "total_steps": 131_072,
    "seeds": 4,
    "model.mlp_width": 128,
    "warm_start.steps": 10_000,
    "warm_start.accuracy": 0.5,
}
# A completion is an episode with its reward at the end, so nothing is discounted.
EPISODES: dict[str, Any] = {
    "config.gamma": 1.0,
    "problem.num_prompts": 256,
    "problem.group_size": 1,
}
# An underfitted critic halves the gain of a natural-gradient step: fit it well, and subsample the
# rows of the Fisher products.
FIT = {"config.value_epochs": 4, "config.value_minibatches": 8, "config.value_learning_rate": 3e-3}
# A mean over many tokens has small gradients: an ε of 1e-5 would shorten the first steps.
GRADIENT = {"config.learning_rate": 1e-3, "config.optimizer_epsilon": 1e-8}
STEPS = GRADIENT | {
    "config.lambda_": 1.0,
    "config.max_grad_norm": 1.0,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
}
NATURAL = EPISODES | FIT | {"config.lambda_": 1.0, "config.fisher_stride": 2}
WITH_CRITIC = {
    "reinforce": EPISODES | FIT | GRADIENT | {"config.max_grad_norm": 1.0},
    "a2c": EPISODES | GRADIENT | {"config.max_grad_norm": 1.0, "config.estimator": "monte_carlo"},
    "npg": NATURAL,
    "trpo": NATURAL | {"config.max_kl": 0.02},
    "ppo": EPISODES | STEPS,
    "ppo_penalty": EPISODES | STEPS,
}
# Four small steps per batch of 512: with 128 completions and an entropy bonus, most seeds forgot
# what the warm start had taught them.
IN_GROUPS = {
    "total_steps": 204_800,
    "config.learning_rate": 1e-3,
    plan.WARM_UP: 30,
    plan.DECAY: 400,
    "config.entropy_coefficient": 0.0,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
    "problem.num_prompts": 64,
    "problem.group_size": 8,
}


FITTED: dict[str, Any] = {"seeds": 1, plan.WARM_UP: 100, plan.DECAY: 400}
# Their surrogates are not clipped, so they are valid only near the old policy.
UNCLIPPED = ("rloo", "pkpo", "distillation")
# A pretrained model forgets at the step sizes of a new one.
PRETRAINED: dict[str, Any] = {"config.learning_rate": 1e-5, "seeds": 1, "config.num_epochs": 1}
# Adapters begin at zero, and their base is the reference that they cannot forget.
ADAPTED = {**PRETRAINED, "config.learning_rate": 5e-4, "config.use_reference": False}
# A reward model is reliable only near the initial policy, whose samples it was fitted on; hence the
# KL penalty to that policy.
JUDGED = {"reward_model.width": 32, "reward_model.mlp_width": 64}
REFERRED = {"reference.enabled": True}


def of_pretrained(options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Default values of flags that suit a pretrained model, or adapters of one; else none."""
    published = given.get("model.shape", "none") != "none"
    if not (published or models.root(options.init_from)):
        return {}
    suited = ADAPTED if given.get("lora.rank") else PRETRAINED
    fields = methods.ALGORITHMS[options.algorithm].Config.__dataclass_fields__
    return {
        name: value
        for name, value in suited.items()
        if not name.startswith("config.") or name.removeprefix("config.") in fields
    }


def of_language(options: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Default values of flags that suit small transformers."""
    small: dict[str, Any] = dict(SMALL)
    if options.init_from or options.task == tasks.RANDOM:
        small = {name: value for name, value in small.items() if not name.startswith("warm_start.")}
    if options.reward == MODEL:
        small |= JUDGED | (REFERRED if options.algorithm in ("ppo", "ppo_penalty") else {})
    gentle = of_pretrained(options, given)
    if options.algorithm in WITH_CRITIC:
        return small | WITH_CRITIC[options.algorithm] | gentle
    if options.algorithm in methods.SUPERVISED:
        return small | FITTED | gentle
    if options.algorithm == "dapo" and (options.environment or rewarding.functions(options)):
        # A refill needs the scores inside the program.
        small |= {"config.dynamic_sampling": dapo.REWEIGHT}
    once = {"config.num_epochs": 1} if options.algorithm in UNCLIPPED else {}
    return small | IN_GROUPS | once | gentle if options.algorithm in methods.IN_GROUPS else {}
