"""Lists the algorithms: each module has a `Config` and `make(config, problem) -> Learner`."""
