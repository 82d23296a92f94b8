"""The folder of a run: checkpoints, metrics, provenance."""
