"""`python -m triton_gemm` is the command `triton-gemm`."""

from .cli import main

if __name__ == "__main__":
    main()
