"""Experiments: the settings, tasks, models and environments that flags name."""
