"""What is to be run: settings, tasks, models and environments by name."""
