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

    tl = jit = _Absent()

    def cdiv(x: int, y: int) -> int:  # these two are for plain paths as well
        return -(-x // y)

    def next_power_of_2(n: int) -> int:
        return 1 << (n - 1).bit_length()


__all__ = ["HAS_TRITON", "cdiv", "jit", "next_power_of_2", "tl"]
