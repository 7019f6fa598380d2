"""The model that is trained: its log-probs, its optimizer steps, its weights on disk."""
