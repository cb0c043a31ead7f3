"""Run trainings: processes, devices, schedules and Slurm."""
