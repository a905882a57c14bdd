"""Triton where it is installed; otherwise names that let the kernels' files be imported for their plain paths."""

try:
    import triton.language as tl
    from triton import cdiv, jit, next_power_of_2

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    class _Absent:
        def __getattr__(self, name):
            return self

        def __call__(self, value=None, **options):
            return self if options else value

    tl = jit = cdiv = next_power_of_2 = _Absent()

__all__ = ["HAS_TRITON", "cdiv", "jit", "next_power_of_2", "tl"]
