"""The viewer of run directories and collections: pages, comparisons, verdicts, and a step recomputed from its files."""
