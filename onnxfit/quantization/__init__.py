"""Integer models: make one of a float model, train its integers, and report what it loses."""
