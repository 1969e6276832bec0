"""`rrfp balance`: parameters and floating-point operations of every pipeline stage, from Megatron's arguments, without starting anything."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rrfp.balance.arguments import IMAGES, Model, read_model
from rrfp.balance.layout import write_layout
from rrfp.balance.table import as_json, balance, lines
from rrfp.balance.vision import LAYOUT, vision_letters
from rrfp.errors import ConfigurationError
from rrfp.outputs import check_file

USAGE = "rrfp balance [--suggest] [--json FILE] <Megatron's arguments>"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status. Raises ConfigurationError for arguments that no model can be built of."""
    show(*options_of(sys.argv[1:] if argv is None else argv))
    return 0


def options_of(argv: Sequence[str], *, helps: bool = True) -> tuple[argparse.Namespace, list[str]]:
    """What is to be shown, by option, None or False where not given, and the rest: Megatron's arguments. helps: answers --help."""
    parser = argparse.ArgumentParser(
        prog="rrfp balance", usage=USAGE, description=__doc__.split(": ", 1)[1], allow_abbrev=False, add_help=helps,
        epilog="All other arguments are Megatron's, as given to pretrain_gpt.py; those that don't change a size are ignored.")
    parser.add_argument("--suggest", action="store_true",
                        help="for the layout whose busiest stage is as light as can be, which is printed, instead of the one given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--images", type=_images, nargs="+", metavar="N", help="with a vision tower, images of the samples whose "
                        f"costs are shown; stages are compared for the first (default {' '.join(f'{count:g}' for count in IMAGES)})")
    return parser.parse_known_args(argv)


def show(options: argparse.Namespace, argv: Sequence[str]) -> None:
    """Prints the table of the model that Megatron's arguments describe, and writes its figures. options: of `options_of`. Raises as `main`."""
    check_file("--json", options.json)
    model = read_model(argv, even=options.suggest, images=options.images or IMAGES)
    if options.images and not model.has_vision:
        raise ConfigurationError("--images: these arguments have no vision tower (--vit-num-layers); leave it out")
    print("\n".join(_report(model, even=options.suggest)))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(balance(model), model), indent=1) + "\n")


def _report(model: Model, *, even: bool) -> list[str]:
    """Its table; `even`: it has the most even layout, which is named."""
    found = lines(balance(model), model)
    if even:
        letters = ["".join(part.name for part in stage) for stage in model.stages]
        option = "--pipeline-model-parallel-layout"
        if any("v" in stage for stage in letters):
            option, letters = LAYOUT, vision_letters(letters)
        found.append(f"this is the layout whose busiest stage is lightest: {option} '{write_layout(letters)}'")
    return found


def _images(text: str) -> float:
    try:
        count = float(text)
    except ValueError:
        count = -1.0
    if not 0 <= count < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r}: must be a number of at least 0")
    return count
