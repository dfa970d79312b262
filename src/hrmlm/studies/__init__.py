"""Studies: grids of training runs as data, run to the end whatever happens, and their report."""
