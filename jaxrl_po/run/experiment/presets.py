"""Default flags of `jaxrl-po language`, by kind of initial model, kind of reward and method."""

import functools
from collections.abc import Collection
from typing import Any

from jaxrl_po.algorithms.actor_critic import GAE, Epochs
from jaxrl_po.config import Json, Values
from jaxrl_po.run.experiment import rewarding, user_code
from jaxrl_po.run.experiment.language_config import LanguageOptions, task_entry
from jaxrl_po.run.experiment.options import InitialModel
from jaxrl_po.run.experiment.settings import DECAY, WARM_UP

# Kinds of initial model. Adapters of a pretrained model belong to the last two kinds.
ANY, NEW, PRETRAINED, ADAPTERS = "", "new", "pretrained", "adapters"
MODEL = "model"  # kind of reward: a reward model
# Kinds of methods, and of their critics.
WITH_CRITIC, IN_GROUPS, SUPERVISED = "with a critic", "in groups", "supervised"
BY_GAE, IN_EPOCHS, UNCLIPPED = "estimates by GAE", "in epochs", "in groups, without a clip"

# Maps (kind of initial model, kind of reward, kind of method) to flags; the last row wins, but
# defaults of the method's entry come after all rows. A flag that a run lacks has no effect.
PRESETS: dict[tuple[str, str, str], dict[str, Any]] = {
    (ANY, ANY, ANY): {"total_steps": 131_072, "seeds": 4, "model.mlp_width": 128},
    (NEW, ANY, ANY): {"warm_start.steps": 10_000, "warm_start.accuracy": 0.5},
    # A reward model is reliable only near the initial policy, whose samples it was fitted to; hence
    # the KL penalty to the initial policy in methods of several epochs.
    (ANY, MODEL, ANY): {"reward_model.width": 32, "reward_model.mlp_width": 64},
    (ANY, MODEL, IN_EPOCHS): {"reference.enabled": True},
    # Few epochs over large batches keep a small model stable.
    (ANY, ANY, WITH_CRITIC): {
        # A completion is an episode with its reward at the end, so nothing is discounted.
        "config.gamma": 1.0,
        "problem.num_prompts": 256,
        "problem.group_size": 1,
        # An underfitted critic halves the gain of a natural-gradient step: fit the critic well, and
        # subsample the rows of the Fisher products.
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
    },
    (ANY, ANY, BY_GAE): {"config.lambda_": 1.0},
    # Four small steps per batch of 512: with 128 completions and an entropy bonus, most seeds
    # forgot the answers of the warm start.
    (ANY, ANY, IN_GROUPS): {
        "total_steps": 204_800,
        "config.learning_rate": 1e-3,
        WARM_UP: 30,
        DECAY: 400,
        "config.entropy_coefficient": 0.0,
        "config.num_epochs": 2,
        "config.num_minibatches": 2,
        "problem.num_prompts": 64,
        "problem.group_size": 8,
    },
    (ANY, ANY, UNCLIPPED): {"config.num_epochs": 1},
    (ANY, ANY, SUPERVISED): {"seeds": 1, WARM_UP: 100, DECAY: 400},
    # A pretrained model forgets at the step sizes of a new model.
    (PRETRAINED, ANY, ANY): {"config.learning_rate": 1e-5, "seeds": 1, "config.num_epochs": 1},
    # Adapters start at zero, and the base below them is the reference that they cannot forget.
    (ADAPTERS, ANY, ANY): {"config.learning_rate": 5e-4, "config.use_reference": False},
}


def language_presets(
    options: LanguageOptions,
    values: Values,
    initial: InitialModel,
    starts: Collection[str] = (ANY, NEW, PRETRAINED, ADAPTERS),
) -> Json:
    """Returns presets of a run by flag name, from the rows of `PRESETS` with a kind in `starts`.

    The defaults of the method's entry apply to every kind of initial model.
    """
    pretrained = bool(initial.pretrained) or values.get("model.shape", "none") != "none"
    entry = options.entry
    start = {
        NEW: not options.init_from and task_entry(options.task).has_answers,
        PRETRAINED: pretrained,
        ADAPTERS: pretrained and bool(values.get("lora.rank")),
    }
    reward = {MODEL: rewarding.is_model(options)}
    method = {
        WITH_CRITIC: entry.has_critic,
        IN_GROUPS: entry.compares_groups,
        SUPERVISED: entry.supervised,
        BY_GAE: getattr(entry.Config, "estimator", "") == GAE,
        IN_EPOCHS: issubclass(entry.Config, Epochs),
        UNCLIPPED: entry.compares_groups and not entry.clips,
    }
    found: dict[str, Any] = {}
    for key, row in PRESETS.items():
        pairs = zip(key, (start, reward, method), strict=True)
        if key[0] in starts and all(kind == ANY or kinds.get(kind) for kind, kinds in pairs):
            found |= row
    if ANY in starts:
        on_host = options.tools or rewarding.scores_on_host(options)
        found |= {**entry.language, **(entry.functions if on_host else {})}
    return user_code.without_replaced(vars(options), found)


of_pretrained = functools.partial(language_presets, starts=(PRETRAINED, ADAPTERS))
