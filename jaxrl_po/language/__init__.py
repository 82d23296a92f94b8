"""Language problems: small transformers, sampling, and tasks with jittable verifiers."""

from jaxrl_po.language import dialogues, pretrained, reward_model, rewards, tasks
from jaxrl_po.language.dialogue import Dialogue
from jaxrl_po.language.evaluation import make_describe, make_evaluate, render
from jaxrl_po.language.mismatch import Sampler
from jaxrl_po.language.problem import give_reward, make_problem
from jaxrl_po.language.reward_model import Preferences, RewardModel, learned_reward
from jaxrl_po.language.sampling import Decoding
from jaxrl_po.language.settings import LanguageSettings, ModelSettings
from jaxrl_po.language.tasks import Prompt, Task
from jaxrl_po.language.tasks.types import Sequences
from jaxrl_po.language.tokenizer import Tokenizer, make_tokenizer
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.language.warm_start import WarmStart

__all__ = [
    "Decoding",
    "Dialogue",
    "LanguageSettings",
    "ModelSettings",
    "Preferences",
    "Prompt",
    "RewardModel",
    "Sampler",
    "Sequences",
    "Task",
    "Tokenizer",
    "Transformer",
    "WarmStart",
    "dialogues",
    "give_reward",
    "learned_reward",
    "make_describe",
    "make_evaluate",
    "make_problem",
    "make_tokenizer",
    "pretrained",
    "render",
    "reward_model",
    "rewards",
    "tasks",
]
