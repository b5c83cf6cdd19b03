"""`python -m triton_gemm.ladder k06`: one rung by hand. A wheel does not hold `perf.ladder.by_hand`."""

import sys

try:
    from perf.ladder.by_hand import main
except ModuleNotFoundError as error:
    if error.name not in ("perf", "perf.ladder"):
        sys.exit(f"error: {error}; in a clone: pip install -e '.[dev]'")
    sys.exit(
        "error: rungs are run and measured by the repository's `perf`, which is not installed: run this in a clone"
    )

if __name__ == "__main__":
    sys.exit(main())
