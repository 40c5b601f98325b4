"""The training loop: epochs and batches, the position of a fit, and its checkpoints."""
