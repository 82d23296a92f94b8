"""Lists flags of runs that compile in moments and end in seconds."""

MODEL = [
    "--model.width=8",
    "--model.layers=1",
    "--model.heads=2",
    "--model.kv_heads=1",
    "--model.mlp_width=8",
]
CONTROL = [
    "--seeds=2",
    "--devices=1",
    "--total_steps=3200",
    "--log_every=2",
    "--eval_every=3",
    "--eval_episodes=2",
    "--problem.num_envs=4",
    "--problem.num_steps=8",
    "--network.width=8",
    "--config.num_minibatches=2",
    "--config.num_epochs=1",
]
SWEPT = [flag for flag in CONTROL if "_every" not in flag]  # a sweep does not print lines
LANGUAGE = [
    "--seeds=2",
    "--devices=1",
    "--total_steps=24",
    "--eval_prompts=4",
    "--eval_samples=2",
    "--show=3",
    "--task.num_digits=1",
    "--problem.num_prompts=2",
    "--problem.group_size=4",
    *MODEL,
    "--config.num_minibatches=2",
    "--config.num_epochs=1",
    "--warm_start.steps=2",
    "--warm_start.batch_size=4",
]
