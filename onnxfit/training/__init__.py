"""The loop: epochs and batches, where a fit stands, and its checkpoints."""
