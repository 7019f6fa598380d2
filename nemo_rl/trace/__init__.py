"""The trace of a run, read: where the time of its steps went, and which key moves it."""
