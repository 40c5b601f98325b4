"""How a step is run: as one graph (full), or as separate graphs that a caller can stand between
(forward_backward).
"""
