"""Attention and small ops: tensors in, tensors out. Imports nothing of ours."""
