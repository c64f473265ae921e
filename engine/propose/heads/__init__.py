"""Prediction heads: small modules that read the target's hidden states and draft beside it.

``eagle`` is the head as a torch module, for training and drafting, with its files; ``mtp`` the layers that some checkpoints
bring along; ``source`` what keeps their state by sequence and drafts; ``load`` finds the head that a configuration names.
"""
