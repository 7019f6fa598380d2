"""Collections as Slurm jobs: scripts are text made from the configuration; hosts and ports are found on the nodes."""
