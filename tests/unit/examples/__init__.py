"""The files of examples/ that are more than a call of the package."""
