"""Distribution of seeds, batch rows and parameters over devices and processes."""
