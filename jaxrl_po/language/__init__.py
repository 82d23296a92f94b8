"""Language problems: small transformers, sampling, and tasks whose answers are verified inside the program."""
