"""Models that train in another form: integers as floats, and adapters beside frozen weights.

The form of a model that trains as it is, `TrainableModel`, is in `load/trainable.py`.
"""
