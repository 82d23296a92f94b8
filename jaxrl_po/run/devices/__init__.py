"""Distribution of seeds, rows and parameters over devices and processes."""
