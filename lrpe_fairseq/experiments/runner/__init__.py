"""Processes, devices, schedules and Slurm: one training after another, to the end."""
