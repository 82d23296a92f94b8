"""Everything with side effects: devices, files, processes, progress, plots and the commands."""
