"""Seeds, rows and parameters over devices and processes."""
