"""Studies: one recipe at many batches, seeds and arms, and what the results say together."""
