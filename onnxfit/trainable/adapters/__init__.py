"""Adapters of low rank: small matrices that train while the weights of a model stay frozen."""
