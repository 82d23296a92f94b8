"""Dialogues with `--tools` on the host: from flags to an engine, checked before compilation."""

import itertools

from jaxrl_po import language
from jaxrl_po.algorithms import dapo
from jaxrl_po.config import ConfigError, Json
from jaxrl_po.language.pretrained import ChatTemplate
from jaxrl_po.language.pretrained import tools as tools_lib
from jaxrl_po.language.pretrained.tools import ASSISTANT, TOOL, USER, Tools
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.run import errors
from jaxrl_po.run.data import prompts, tables
from jaxrl_po.run.data.scoring import HostScore, Scorer
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import models, rewarding
from jaxrl_po.run.experiment.language_config import LanguageConfig
from jaxrl_po.run.host.dialogues.engine import HostDialogues
from jaxrl_po.run.host.dialogues.tool_env import UNKNOWN, Environments, ToolEnv
from jaxrl_po.run.store import sources


def make_dialogues(
    config: LanguageConfig, start: models.RunModels, reward_fn: Scorer | None, placement: Placement
) -> HostDialogues:
    """Starts the environments of a run, and returns the dialogues of the run.

    Args:
      config: Settings of the run.
      start: Task, model and parameters of the run; see `models.RunModels`.
      reward_fn: Functions of `--reward`, or None.
      placement: Placement on devices.

    Raises:
      UsageError: Flags contradict each other, the class cannot be used, or the chat template does
        not write tool calls or replies; the error names the flag.
    """
    options, settings, sizes = config.run, config.tools, config.problem
    assert isinstance(sizes, SamplingSettings)
    assert settings is not None
    template, text = require_template(config, start, placement)
    if not isinstance(reward_fn, HostScore | None):
        raise ConfigError("reward", "must name functions with tools, got an object that scores")
    assert isinstance(start.task, language.Task)
    rows = read_prompt_rows(config)
    environments = Environments(options.tools, float(settings.timeout))
    spec = environments.start(list(rows[0]))
    try:
        if not spec.reward and reward_fn is None:
            raise ConfigError(
                "tools", "must have a method get_reward, or reward must name functions"
            )
        assert isinstance(config.task, tables.File)
        written = config.task.template_arguments
        arguments = errors.json_object("task.template_arguments", written)
        try:
            found = tools_lib.detect_format(template, text.tokenizer, spec.tools, arguments)
            longest = max(len(found.prompt(row["prompt"])) for row in rows)
        except ConfigError as error:
            raise ConfigError("init_from", f"{options.init_from}: {error}") from None
        require_reply(settings.reply_length, found)
        environment = ToolEnv(
            environments, spec, found, rows, reply_length=settings.reply_length, reward_fn=reward_fn
        )
        host = HostDialogues(
            start.task,
            start.policy,
            environment,
            sizes,
            settings.turns,
            longest + settings.reply_length,
            settings.reply_length,
            options.eval_prompts,
            options.eval_samples,
            options.show,
        )
        require_context(host, text.context, options.init_from)
    except BaseException:
        environments.close()
        raise
    return host


def require_template(
    config: LanguageConfig, start: models.RunModels, placement: Placement
) -> tuple[ChatTemplate, prompts.PromptEncoder]:
    """Returns chat template and text conversion; raises ConfigError if flags forbid `--tools`."""
    options = config.run
    if not sources.is_source(options.tools):
        raise ConfigError("tools", "must be a file and a class, file.py:Class")
    if not options.init_from:
        raise ConfigError(
            "init_from", "must name a pretrained model with a chat template, which writes the tools"
        )
    if start.base is None or start.base.text.template is None:
        raise ConfigError(
            "init_from",
            f"must have a chat template, which writes the tools, got {options.init_from!r}",
        )
    if placement.cuts_params:
        raise ConfigError("tools", "must be left out with sharded parameters (shard_params, mesh)")
    if rewarding.is_model(options):
        raise ConfigError("reward", f"must be left out with tools, got {options.reward}")
    if config.warm_start is not None and config.warm_start.steps:
        raise ConfigError("warm_start.steps", "must be 0 with tools")
    if options.entry.refills(config.method):
        raise ConfigError(
            "config.dynamic_sampling",
            f"must be {dapo.REWEIGHT} or off with tools: a refill needs JAX",
        )
    if not config.problem.max_new_tokens:
        raise ConfigError(
            "problem.max_new_tokens", "must be given with tools: the token budget of a message"
        )
    return start.base.text.template, start.base.text


def read_prompt_rows(config: LanguageConfig) -> list[Json]:
    """Returns the columns of each prompt of the task, in order; messages are `prompt`, as in TRL.

    Raises:
      ConfigError: The messages have no user's message, to which a reset could add a text, or end
        with a message of the assistant.
    """
    assert isinstance(config.task, tables.File)
    parts = tables.read_rows(config.task, answers=False, whole=True)
    found = []
    for row in itertools.chain(*parts):
        columns = dict(row.columns)
        messages = columns.pop(prompts.MESSAGES, None) or [
            {"role": USER, "content": columns[prompts.PROMPT]}
        ]
        if not any(message["role"] == USER for message in messages):
            raise row.error(f"{prompts.MESSAGES} must have a user's")
        if messages[-1]["role"] == ASSISTANT:
            raise row.error(f"{prompts.MESSAGES} must not end with the assistant's")
        found.append(columns | {prompts.PROMPT: messages})
    return found


def require_reply(reply_length: int, tools: Tools) -> None:
    """Raises ConfigError if an empty result of a tool is longer than a reply may be."""
    if not tools.names:
        return
    least = max(
        len(tools.reply([{"role": TOOL, "name": name, "content": ""}]))
        for name in (*tools.names, UNKNOWN)
    )
    if least >= reply_length:
        raise ConfigError(
            "tools.reply_length",
            f"must be above {least}, the tokens of an empty result of a tool, got {reply_length}",
        )


def require_context(host: HostDialogues, context: int, init_from: str) -> None:
    """Raises ConfigError for dialogues that exceed the context of the model."""
    whole = host.prompt_length + host.columns
    if 0 < context < whole:
        raise ConfigError(
            "tools.turns",
            f"the longest dialogue has {whole} tokens, more than {context}, the context of "
            f"init_from = {init_from}; lower problem.max_new_tokens or tools.reply_length too",
        )
