"""Commands as jobs: restarted by a supervisor that watches them, or submitted to Slurm."""
