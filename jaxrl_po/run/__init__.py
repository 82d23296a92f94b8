"""The impure part: devices, files, processes, progress, plots, and the commands that a user starts."""
