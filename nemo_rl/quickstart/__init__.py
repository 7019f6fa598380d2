"""The quickstart's model: a small speller, made on the spot, that GRPO visibly improves."""
