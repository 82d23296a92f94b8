"""Experiments: their settings, tasks, models and environments by name."""
