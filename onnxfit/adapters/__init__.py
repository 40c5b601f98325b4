"""Adapters of low rank, which train beside the frozen weights of a model."""
