"""Functions from a model to an edited model: of its structure, or of its integers."""
