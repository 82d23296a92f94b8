"""Contents of a run's folder: checkpoints, metrics and provenance."""
