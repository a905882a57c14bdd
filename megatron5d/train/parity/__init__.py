"""Whether a layout computes what one process computes: a short run of both, and everything that differs."""
