"""What makes Triton kernels trustworthy on a machine without a GPU: a repaired interpreter and a compile gate.

Nothing here is imported by the operations themselves.
"""
