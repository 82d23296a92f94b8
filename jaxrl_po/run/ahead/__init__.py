"""Programs compiled ahead of time for machines that are not here, and what they will need."""
