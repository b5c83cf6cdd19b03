"""Where the device models come from: python -m perf.calibrate measure | fit FILE... | regret FILE... | design FILE...

`measure` (needs a GPU) times the candidates that are predicted to be fast, of every kernel in `kernels.KERNELS`, and
cuBLAS, on shapes of every regime, and writes them to one JSON file after each shape. `fit` finds the figures of the
GPU's `DeviceModel` that are most likely after such times, near the present ones, and writes them to
`triton_gemm/device_models.json`. `regret` says how much slower than the fastest of a shape's candidates the one is that
the present model picks, or with --model that of a file of `triton-gemm calibrate`; `fit` says so for both, and with
--hold-out SEED of shapes that it has not seen. `design` prints which shapes tell most about the model, the best first:
what `triton-gemm calibrate` times in a minute. Exit status: 1 if a candidate gave wrong results, 2 for a mistake in the
call, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

os.environ.pop("TRITON_INTERPRET", None)

from perf.calibrate import regret
from perf.calibrate.design import design
from perf.calibrate.measure import measure
from perf.calibrate.shapes import shapes_to_measure
from perf.calibrate.times import FILE, Measured, read
from perf.common import arguments as args
from perf.measure import environment
from triton_gemm.calibration import fit as fits
from triton_gemm.calibration import kept
from triton_gemm.calibration.figures import rounded
from triton_gemm.hardware import device_model
from triton_gemm.hardware.device_model import DeviceModel, model_of
from triton_gemm.suites import SUITES
from triton_gemm.suites.shapes import Shape
from triton_gemm.tuning.timing import DeviceLostError

HELD_OUT = 3  # one in so many shapes
DESIGNED = 72  # shapes that `design` prints
WIDTH = 2.0  # of the prior, in units of its usual standard deviation: hundreds of products outweigh the present model


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.command == "measure":
        return run_measure(given.out, shapes_to_measure(given.limit, given.seed, given.suites))
    try:
        calibration = read(*given.files)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device, shapes = calibration.device, calibration.shapes
    model = model_of(device)
    if given.command == "design":
        print("\n".join(chosen.key for chosen in design(shapes, model, given.count)))
        return 0
    print(regret.text("present model", shapes, model))
    if given.command == "regret":
        if given.model is not None:
            kept_one = kept.load(given.model)
            if kept_one.kept is None:
                print(f"error: {given.model}: {kept_one.elsewhere or kept_one.wrong}", file=sys.stderr)
                return 2
            print(regret.text(f"model in {given.model}", shapes, kept.model_in(kept_one.kept)))
        if absent := regret.unmeasured(calibration):
            print(f"what select chooses was not measured for {len(absent)}: {', '.join(absent)}")
    elif given.hold_out is None:
        source = ", ".join(os.path.relpath(file, environment.ROOT) for file in given.files)
        if given.figures:
            source = f"{', '.join(given.figures)}: {source}; others: {model.source}"
        found = replace(fit(shapes, model, given.figures), source=source)
        print(regret.text("fitted model", shapes, found))
        entries = json.loads(given.out.read_text()) if given.out.exists() else {}  # those of other GPUs stay
        given.out.write_text(json.dumps({**entries, device.name: rounded(found.as_dict())}, indent=1) + "\n")
        print(f"wrote {given.out}")
    else:
        held_out = set(Random(given.hold_out).sample(range(len(shapes)), len(shapes) // HELD_OUT))
        unseen, others = ([x for i, x in enumerate(shapes) if (i in held_out) == out] for out in (True, False))
        print(regret.text("present model, shapes held out", unseen, model))
        print(regret.text("fitted without them", unseen, fit(others, model, given.figures)))
    return 0


def fit(measured: Sequence[Measured], model: DeviceModel, figures: Sequence[str]) -> DeviceModel:
    """The maximum a posteriori model for these times, with a prior around `model`. figures: prefixes of those that may
    change, as "l2" or "kernels.warp_specialised"; all may if there are none."""
    timed = [fits.Timed(found.problem, found.us) for found in measured]
    begins = tuple(f"{name}." for name in figures) or ("",)
    return fits.fit(timed, model, WIDTH, lambda place: f"{'.'.join(place)}.".startswith(begins)).model


def run_measure(out: Path | None, shapes: Sequence[tuple[Shape, str]]) -> int:
    surroundings = environment.describe("calibration")
    if surroundings["gpu"] is None or surroundings["capability"] != [9, 0]:
        print("error: `measure` needs a GPU that is sm_90, for all kernels", file=sys.stderr)
        return 2
    out = out or environment.RESULTS / environment.slug(surroundings["gpu"]) / FILE
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        failures = measure(shapes, out, surroundings)
    except OSError as error:
        print(f"error: cannot write {out}: {error.strerror or error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    except DeviceLostError as lost:
        print(f"error: the GPU cannot be used any more {lost}; what was measured is kept", file=sys.stderr)
        return 1
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = args.parser("calibrate", __doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    measuring = commands.add_parser("measure", help="time candidates and cuBLAS; needs a Hopper GPU")
    measuring.add_argument("--out", type=args.path, metavar="FILE", help=f"default perf/results/<gpu>/{FILE}")
    measuring.add_argument("--limit", type=args.count, metavar="N", help="at most N shapes, evenly spaced")
    measuring.add_argument("--seed", type=int, metavar="SEED", help="other shapes of each regime, none that is listed")
    measuring.add_argument("--suites", nargs="+", choices=SUITES, metavar="SUITE", help="shapes of these suites only")
    fitting = commands.add_parser("fit", help="find a model, and its regret; needs no GPU")
    regretting = commands.add_parser("regret", help="of the present model; needs no GPU")
    designing = commands.add_parser("design", help="which shapes tell most; needs no GPU")
    for command in (fitting, regretting, designing):
        command.add_argument("files", type=args.path, metavar="FILE", nargs="+", help="what `measure` wrote")
    there = device_model.FILE
    fitting.add_argument("--out", type=args.path, metavar="FILE", default=there, help=f"default {there.name}")
    places = "only these may change, as l2 or kernels.warp_specialised"
    fitting.add_argument("--figures", nargs="+", default=(), metavar="PLACE", help=places)
    fitting.add_argument("--hold-out", type=int, metavar="SEED", help="write nothing; judge by a third")
    regretting.add_argument("--model", type=args.path, metavar="FILE", help="also of a calibrated model")
    designing.add_argument("--count", type=args.count, metavar="N", default=DESIGNED, help=f"default {DESIGNED}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
