"""Tests environments in their own processes: time limits, ends, seeds, and replies in dialogues."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from folders import TOOL_ROWS, WORDS, write_tools

from jaxrl_po.language.pretrained import text, tools
from jaxrl_po.language.pretrained.files import read_folder
from jaxrl_po.run.data.scoring import HostScore, Reward, RewardError
from jaxrl_po.run.errors import UserCodeError
from jaxrl_po.run.host.dialogues.engine import DialogueEpisode
from jaxrl_po.run.host.dialogues.tool_env import Environments, ToolEnv
from jaxrl_po.run.host.vector_envs import PoolError

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tests" / "support" / "tool_environments.py"
ROWS = [
    {"secret": row["secret"], "prompt": [{"role": "user", "content": row["prompt"]}]}
    for row in TOOL_ROWS
]
END = WORDS.index("<end>")
GUESS = {
    n: WORDS.index(f'<call>{{"name":"guess","arguments":{{"number":{n}}}}}</call>')
    for n in range(3)
}
RAISES, UNHEARD, LETTER, MALFORMED = range(GUESS[2] + 1, GUESS[2] + 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_tools(tmp_path_factory.mktemp("tools")) / "model"
    return text.read_tokenizer(read_folder(folder), len(WORDS))


@pytest.fixture
def talk(model):
    """Builds the environment of a dialogue from a class of `tool_environments`."""
    made = []

    def make(name, *, reply_length=24, timeout=5.0, reward_fn=None):
        environments = Environments(f"{TOOLS}:{name}", timeout)
        made.append(environments)
        offer = environments.start(list(ROWS[0]))
        found = tools.detect_format(model[1], model[0], offer.tools)
        return ToolEnv(
            environments, offer, found, ROWS, reply_length=reply_length, reward_fn=reward_fn
        )

    yield make
    for environments in made:
        environments.close()


def shown(model, ids):
    return model[0].rules.decode(ids, skip_special_tokens=False)


def episodes(*rows):
    return [
        None if row is None else DialogueEpisode(row, (row, 10 + i)) for i, row in enumerate(rows)
    ]


def test_a_dialogue_is_answered_and_rewarded(model, talk):
    partner = talk("Guess")
    prompts = partner.begin(episodes(0, 2, None, 1), 1)
    assert shown(model, prompts[0]) == "tools: guess raises user: go w1 assistant:".replace(
        "guess raises", "<unk> <unk>"
    )
    replies = partner.answer([[GUESS[1], END], [GUESS[1]], None, [WORDS.index("go"), END]])
    # The second message was truncated, so that the reply begins with the message's end token.
    assert shown(model, replies[0]) == "tool: high assistant:"
    assert shown(model, replies[1]) == "<end> tool: low assistant:"
    assert replies[2:] == [None, None]
    replies = partner.answer([[GUESS[0], GUESS[1], END], [RAISES, END], None, None])
    assert shown(model, replies[0]) == "tool: right tool: high assistant:"
    outcome = partner.finish(first=True, report=print)
    np.testing.assert_allclose(outcome.reward, [0.5, 0.0, 0.0, 0.0])
    assert outcome.ended.tolist() == [False, False, True, True]
    assert outcome.measures["calls"].total.tolist() == [3, 2, 0, 0]
    assert outcome.measures["calls"].count.tolist() == [1, 1, 0, 1]
    assert outcome.measures["failed_calls"].total.tolist() == [0, 1, 0, 0]
    assert outcome.measures["failed_calls"].count.tolist() == [3, 2, 0, 0]


def test_impossible_calls_are_answered_and_counted(talk):
    partner = talk("Guess")
    partner.begin(episodes(0, 0, 0, 0), 1)
    wrong = [[UNHEARD, END], [LETTER, END], [MALFORMED, END], [GUESS[0], MALFORMED, END]]
    assert all(reply is not None for reply in partner.answer(wrong))
    said = [each.messages[-1]["content"] for each in partner._transcripts]
    assert "Tool unheard not found." in said[0]
    assert "unexpected keyword argument 'letter'" in said[1]
    assert "not JSON" in said[2]
    outcome = partner.finish(first=True, report=print)
    assert outcome.measures["failed_calls"].total.tolist() == [1, 1, 1, 1]
    assert outcome.reward.tolist() == [0, 0, 0, 1]


def test_hanging_or_dying_tool_harms_no_other_dialogue(talk):
    partner, lines = talk("Rough", timeout=0.4), []
    partner.begin(episodes(0, 1, 2, 0), 1)
    begun = time.monotonic()
    replies = partner.answer([[RAISES, END], [RAISES, END], [RAISES, END], [GUESS[0], END]])
    assert time.monotonic() - begun < 20.0
    # The first tool is interrupted, and the tool's dialogue continues. The second tool ends its own
    # process, and the third tool has to be killed: the dialogues of both are over.
    assert [reply is None for reply in replies] == [False, True, True, False]
    assert "no result within 0.4 seconds" in partner._transcripts[0].messages[-1]["content"]
    partner.answer([[GUESS[0], END], None, None, None])
    outcome = partner.finish(first=True, report=lines.append)
    assert outcome.reward.tolist() == [1, 0, 0, 1]
    assert outcome.ended.tolist() == [False, True, True, False]
    assert outcome.measures["killed"].total.tolist() == [0, 1, 1, 0]
    assert len(lines) == 1
    assert "ended its process, with status 3" in lines[0]
    # In later dialogues, the numbers of both belong to new environments.
    partner.begin(episodes(0, 1, 2, 0), 1)
    assert None not in partner.answer([[GUESS[0], END]] * 4)


def test_group_members_share_questions_which_a_seed_repeats(talk):
    partner = talk("Echo")
    asked = [
        DialogueEpisode(0, (5, 1)),
        DialogueEpisode(0, (5, 2)),
        DialogueEpisode(0, (6, 1)),
        DialogueEpisode(0, (7, 1)),
    ]
    first = partner.begin(asked, 1), partner.finish(first=True, report=print).reward.tolist()
    assert first[1][0] == first[1][1] != first[1][2]
    assert first[0][0] == first[0][1]
    assert len({tuple(ids) for ids in first[0]}) > 1
    again = partner.begin(asked, 1), partner.finish(first=False, report=print).reward.tolist()
    assert again == first
    assert partner.answer([[GUESS[0], END]] * 4) == [None] * 4


def test_what_is_too_long_is_cut_and_counted(model, tmp_path):
    own = tmp_path / "long.py"
    own.write_text(
        "class Long:\n"
        "    def reset(self, **columns):\n        return ' w1' * 50\n"
        "    def guess(self, number: int):\n"
        "        '''Guesses.\n\n        Args:\n            number: it\n        '''\n"
        "        return 'low ' * 50\n"
        "    def get_reward(self):\n        return 0.0\n"
    )
    environments = Environments(f"{own}:Long", 5.0)
    offer = environments.start(["prompt"])
    partner = ToolEnv(
        environments,
        offer,
        tools.detect_format(model[1], model[0], offer.tools),
        ROWS,
        reply_length=12,
    )
    (prompt,) = partner.begin(episodes(0), 1)
    assert shown(model, prompt).split().count("w1") == 1 + 12
    (reply,) = partner.answer([[GUESS[0], GUESS[0], END]])
    assert shown(model, reply) == "tool:" + 4 * " low" + " tool:" + 4 * " low" + " assistant:"
    outcome = partner.finish(first=True, report=print)
    assert (outcome.measures["cut_replies"].total, outcome.measures["cut_replies"].count) == (2, 2)
    environments.close()


def test_functions_score_the_last_message_beside_the_environment(talk, tmp_path):
    own = tmp_path / "own.py"
    own.write_text(
        "def calls(completions, messages, secret, **columns):\n"
        "    assert [len(m) for m in messages] == [3, 1]\n"
        "    return [10.0 * s + ('go' in c) for c, s in zip(completions, secret)]\n"
    )
    task = type("Task", (), {"tokenizer": None, "columns": print})
    with HostScore([Reward(f"{own}:calls", 2.0)], task) as reward_fn:
        partner = talk("Guess", reward_fn=reward_fn)
        partner.begin(episodes(2, 1), 1)
        partner.answer([[GUESS[2], END], [WORDS.index("go"), END]])
        partner.answer([[WORDS.index("low"), END], None])
        outcome = partner.finish(first=True, report=print)
    assert outcome.score.tolist() == [1, 0]
    assert outcome.reward.tolist() == [1 + 2 * 20, 0 + 2 * 11]
    assert outcome.measures["reward/calls"].total.tolist() == [20, 11]


def test_failed_dialogue_reward_blocks_reward_functions_too(talk, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("def one(completions, **columns):\n    return [1.0] * len(completions)\n")
    task = type("Task", (), {"tokenizer": None, "columns": print})
    said = []
    with HostScore([Reward(f"{own}:one")], task) as reward_fn:
        partner = talk("Broken", reward_fn=reward_fn)
        partner.begin(episodes(None, 2), 2)  # the first seed has no dialogue
        partner.answer([None, [GUESS[2], END]])
        outcome = partner.finish(first=False, report=said.append)
    assert outcome.reward.tolist() == [0, 0]
    assert outcome.measures["environment_failures"].total.tolist() == [0, 1]
    assert outcome.measures["killed"].total.tolist() == [0, 0]
    assert len(said) == 1
    assert "counted in environment_failures" in said[0]


@pytest.fixture
def odd():
    environments = Environments(f"{TOOLS}:Odd", 30.0)
    assert environments.start(["limit", "prompt"]).takes == ("limit", "prompt")

    def call(name, number=0, **arguments):
        calls = [{"name": name, "arguments": arguments}]
        return environments.run({number: {"calls": calls}})[number]["results"][0]

    def reset(number):
        environments.run({number: {"reset": {"limit": 7, "prompt": []}, "seeds": [3, 4]}})

    reset(0)
    yield environments, call, reset
    environments.close()


def test_parameters_have_any_name_and_programs_can_end(odd):
    _, call, _ = odd
    assert call("search", limit=5, function="f") == {"content": "7 5 f", "failed": False}
    assert call("search", limit=5, function="\ud83d")["content"] == "7 5 ?"
    assert call("ends_what_it_starts")["content"] == str(-signal.SIGTERM)


def test_new_instance_gets_the_questions_of_an_old(odd):
    _, call, reset = odd
    first = call("draws")
    reset(0)
    reset(1)
    assert call("draws") == call("draws", number=1) == first


def test_environment_ends_with_its_run_during_work(odd):
    environments, call, _ = odd
    pid = int(call("pid")["content"])
    environments._process.send([(0, {"calls": [{"name": "sleeps", "arguments": {}}]})])
    time.sleep(0.3)
    environments.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


BROKEN = {
    "def reset(self):\n        raise OSError('no board')": "reset raised OSError: no board",
    "def reset(self):\n        pass\n    def get_reward(self):\n        return 1 / 0": (
        "get_reward raised ZeroDivisionError"
    ),
    "def reset(self):\n        pass\n    def get_reward(self):\n        return float('nan')": (
        "get_reward returned nan"
    ),
}


@pytest.mark.parametrize(("body", "said"), BROKEN.items(), ids=list(BROKEN.values()))
def test_failing_environment_ends_first_dialogues_and_counts_later(body, said, model, tmp_path):
    own = tmp_path / "broken.py"
    own.write_text(f"class Broken:\n    {body}\n")
    environments, lines = Environments(f"{own}:Broken", 5.0), []
    offer = environments.start(["prompt"])._replace(reward=True)
    partner = ToolEnv(
        environments, offer, tools.detect_format(model[1], model[0], ()), ROWS, reply_length=12
    )
    for first in (True, False, False):
        partner.begin(episodes(0), 1)
        partner.answer([[END]])
        if first:
            with pytest.raises(RewardError, match=said):
                partner.finish(first=True, report=print)
        else:
            outcome = partner.finish(first=False, report=lines.append)
            assert outcome.measures["environment_failures"].total == 1
            assert outcome.reward == 0
    assert len([line for line in lines if "environment_failures" in line]) == 1
    environments.close()


CLASSES = {
    "x = (": "SyntaxError",
    "class Other:\n    pass": "holds no 'Mine', but Other",
    "class Mine:\n    pass": "lacks the method reset",
    "class Mine:\n    def reset(self, colour):\n        pass": (
        "reset takes 'colour', which is no column of the prompts: prompt"
    ),
    "class Mine:\n    def __init__(self):\n        1 / 0": "ZeroDivisionError",
    "class Mine:\n    def reset(self):\n        pass\n    def go(self, x):\n        '''Goes.'''": (
        "parameter x of go lacks a type hint"
    ),
    "import os\nclass Mine:\n    def __init__(self):\n        os._exit(1)": "ended its process",
}


@pytest.mark.parametrize(("source", "said"), CLASSES.items(), ids=list(CLASSES.values()))
def test_unusable_class_gives_one_line(source, said, tmp_path):
    own = tmp_path / "mine.py"
    own.write_text(source + "\n")
    with pytest.raises(UserCodeError, match=r"^tools: ") as found:
        Environments(f"{own}:Mine", 1.0).start(["prompt"])
    assert said in str(found.value)
    assert "\n" not in str(found.value)


def test_processes_end_with_run_and_killed_worker_raises(talk):
    partner = talk("Guess")
    partner.begin(episodes(0, 1), 1)
    worker = partner._environments._process.pid
    children = [
        int(number) for number in Path(f"/proc/{worker}/task/{worker}/children").read_text().split()
    ]
    assert len(children) == 2
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(PoolError, match="the worker ended its process, with status -9"):
        partner.answer([[GUESS[0], END]] * 2)
    deadline = time.monotonic() + 10.0
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.getpid() not in children
