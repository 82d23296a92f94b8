"""Claims over many runs, and their verdicts."""
