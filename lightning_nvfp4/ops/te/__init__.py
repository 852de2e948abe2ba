"""Transformer Engine (TE) as the backend: its own GEMMs on the model's parameters.

Nothing in this package imports TE before a layer runs, so that plans can be made, and printed, on any machine.
"""
