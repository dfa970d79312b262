"""Training: recipe, optimizer and schedule, the loop, run directory and record."""
