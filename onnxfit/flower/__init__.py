"""Federated learning with Flower: a Trainer as a client, and the server's arrays as its weights."""

from __future__ import annotations

from onnxfit.flower.app import client_app, get_arrays, set_arrays
from onnxfit.flower.federated_client import FlowerClient, client

__all__ = ["FlowerClient", "client", "client_app", "get_arrays", "set_arrays"]
