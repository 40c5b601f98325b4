"""Read a file, check and complete it, and prepare it for training."""
