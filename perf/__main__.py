"""`python -m perf`: what there is to run."""

COMMANDS = {
    "report": "climb the ladder: every rung, its CUDA twin and cuBLAS; static facts without a GPU",
    "bench": "suites of shapes against cuBLAS; --list shows them without a GPU",
    "accuracy": "errors of every kernel, precision and bit class against fp64; small products without a GPU",
    "battery": "all that shows the kernels to be right on a GPU, in one table",
    "calibrate": "measure and fit the constants of the cost model",
    "tuning": "what the model's choices lose, and what tune finds, on products listed and drawn",
    "models": "whole models of transformers by torch and by triton_gemm; --tiny needs no GPU",
    "models.learning": "what use(learn=True) finds in a service, on GEMMs drawn or with models",
    "choices": "what changed choices lose by recorded times; needs no GPU",
    "kit": "build machine code to ship, and show which GEMMs it serves; needs no GPU",
    "drift": "what other Tritons make of the kernels, against a record; needs no GPU",
    "pages": "put the committed results into README.md and docs/",
    "ladder.explorer": "write a page to play with: what tile, warps and stages cost a rung on six GPUs; needs no GPU",
    "ladder.player": "write a page that plays what the ladder's drawings show; needs no GPU",
    "ladder.picker": "write a page on which one guesses the fastest candidate of a GEMM; needs no GPU",
    "ladder.compiled": "write registers and shared memory of compiled rungs, for that page; needs no GPU",
    "ladder.counters": "launch one CUDA twin once, for Nsight Compute",
    "ladder.interpret": "run the rungs in Triton's interpreter, against fp64",
}

if __name__ == "__main__":
    for command, what in COMMANDS.items():
        print(f"  python -m perf.{command:<17} {what}")
    print(f"  python -m {'triton_gemm.ladder':<22} one rung by hand\n\nEach has --help.")
