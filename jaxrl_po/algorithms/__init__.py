"""The algorithms, one screen each: `make(config, problem) -> Learner`."""
