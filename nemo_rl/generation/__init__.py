"""Generation engines (interfaces.Generation): token ids in, sampled token ids and their log-probs out."""
