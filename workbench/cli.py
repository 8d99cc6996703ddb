"""The command line: `twell COMMAND …`.

A command is a row of `COMMANDS`: the dataclass of its options and the function that does the work, named as text so
that nothing is imported before it is needed. Signatures, help and types come from the dataclass's fields. This is the
one module that may reach into any folder. Errors are one sentence and exit code 2; `--debug` shows the traceback.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import os
import sys
import typing
from collections.abc import Callable
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from twell.workbench import options
from twell.workbench.ablations.options import AblateOptions, PruneOptions
from twell.workbench.bench.options import BenchOptions
from twell.workbench.errors import UserError, escaped, not_installed, print_error, refused, wrong_line, wrong_value
from twell.workbench.garbage import uncollected

COMMANDS: dict[str, tuple[type, str]] = {
    "demo": (options.DemoOptions, "twell.workbench.cli:demo"),
    "doctor": (options.DoctorOptions, "twell.workbench.doctor:doctor"),
    "capture": (options.CaptureOptions, "twell.workbench.cli:capture"),
    "text": (options.TextOptions, "twell.workbench.cli:text"),
    "tokens": (options.TokensOptions, "twell.analysis.exports.terminal:tokens"),
    "verify": (options.VerifyOptions, "twell.workbench.verify:verify"),
    "ablate": (AblateOptions, "twell.workbench.cli:ablate"),
    "prune": (PruneOptions, "twell.workbench.cli:prune"),
    "bench": (BenchOptions, "twell.workbench.bench.command:bench"),
    "summarize": (options.SummarizeOptions, "twell.analysis.summaries.refresh:summarize"),
    "check": (options.CheckOptions, "twell.analysis.checks.command:check"),
    "app": (options.AppOptions, "twell.app.server.launch:launch"),
    "export": (options.ExportOptions, "twell.analysis.exports.command:export"),
    "compare": (options.CompareOptions, "twell.analysis.compare:compare"),
    "train": (options.TrainOptions, "twell.workbench.training.command:train"),
}

BEGINS: dict[type, str] = {  # what a command that first loads torch and a model says at once
    options.CaptureOptions: "Loading {model} to read {text} into {out} …",
    AblateOptions: "Loading the model of {target} …",
    options.VerifyOptions: "Loading {run} and its model, to compare up to {tokens:,} of its tokens …",
    options.TrainOptions: "Loading {text} to train {config} into {out} …",
}
DEMO_TOKENS = 160_000  # every passage, and enough of the Python documentation for rankings to mean something
DEMO_EXAMPLES = 8  # of each neuron and kind

HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}  # columns
SPIN = "2000"  # times that torch's threads look for work before they sleep; libgomp's 300,000 keep cores from others
VALUES = {int: "N", float: "X", Path: "PATH", str: "TEXT"}  # placeholders for values in the help, by type

cli = typer.Typer(
    name="twell",
    help="Which neurons of a sparse language model fire, and what that is worth.",
    epilog="Errors are one sentence, and exit code 2; with --debug anywhere in the command, the traceback too.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP,
)


def _version(requested: bool) -> None:
    if requested:
        print(f"twell-workbench {importlib.metadata.version('twell-workbench')}")
        raise typer.Exit


@cli.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


def parameter(item: Field[Any], hint: Any) -> inspect.Parameter:
    """Return the typer parameter of an option. item: its dataclass field; hint: the field's type."""
    metadata = item.metadata
    text = metadata["help"] + (f" [{metadata['unit']}]" if metadata["unit"] else "")
    kinds = [kind for kind in typing.get_args(hint) if kind not in (type(None), ...)] or [hint]
    if typing.get_origin(hint) is tuple:
        hint = list[kinds[0]]  # type: ignore[valid-type]
    value = metadata["value"] or VALUES.get(kinds[0])  # a choice of words stands for itself
    name = item.name.rstrip("_").replace("_", "-")
    if metadata["argument"]:
        kind: Any = typer.Argument(help=text, metavar=value)
    elif hint is bool:  # what is off is switched on, and what is on is switched off
        kind = typer.Option(f"--{name}/--no-{name}" if item.default else f"--{name}", help=text, show_default=False)
    else:
        kind = typer.Option(f"--{name}", help=text, metavar=value)  # by name: `value` is not to be taken for it
    default = inspect.Parameter.empty if item.default is MISSING else item.default
    if default == ():
        default = []
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, kind]
    )


def command(dataclass: type, target: str) -> Callable[..., None]:
    """Return a function with the dataclass's fields as its signature, which imports and calls "module:function"."""

    def run(**values: Any) -> None:
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        chosen = dataclass(**values)
        importlib.import_module("twell.workbench.preflight").refuse(chosen)
        module, function = target.split(":")
        if dataclass in BEGINS and os.environ.get("RANK", "0") == "0":
            print(BEGINS[dataclass].format(**values | {"text": ", ".join(values.get("text", ()))}), flush=True)
        with uncollected():  # a function of this module imports more, for a model, as it is called
            importlib.import_module("twell.workbench.models.load" if module == __name__ else module)
        getattr(importlib.import_module(module), function)(chosen)

    hints = typing.get_type_hints(dataclass)
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter(item, hints[item.name]) for item in fields(dataclass)]
    )
    return run


def help_and_examples(dataclass: type) -> tuple[str, str]:
    """Return a command's help and its examples, from the dataclass's docstring."""
    lines = inspect.cleandoc(dataclass.__doc__ or "").splitlines()
    examples = [line for line in lines if line.startswith("twell ")]
    text = "\n".join(line for line in lines if not line.startswith("twell ")).strip()
    return text, "\b\nExamples:\n" + "\n".join(f"  {line}" for line in examples)


def capture(chosen: options.CaptureOptions) -> None:
    """Capture; then say how fast the FFN was and what can be done with the run."""
    from twell.workbench.capturing.command import capture as record
    from twell.workbench.capturing.progress import next_commands
    from twell.workbench.run.checks.unfinished import telling_how_to_resume

    with telling_how_to_resume(chosen.out):
        run = record(chosen)
    if os.environ.get("RANK", "0") != "0":
        return
    with suppress(ImportError, UserError):  # analysis may not be installed where models run; a run may have no timings
        from twell.analysis.speed.ffn_speedup import ffn_speedup, sentence

        print(sentence(ffn_speedup(run)))
    print(next_commands(run))


def ablate(chosen: AblateOptions) -> None:
    """Take things away, and print what the loss says of each condition."""
    from twell.workbench.ablations import command as study

    try:
        from twell.analysis.ablations import allocation
        from twell.analysis.ablations.by_condition import lines_of
    except ImportError as error:  # analysis may not be installed where models run
        if chosen.budget is not None:
            raise UserError(not_installed(str(error.name))) from None
        print(study.unprinted(study.ablate(chosen)))
        return
    studies: list[int] = []
    run = study.ablate(chosen, allocation.allocated, studies.append)
    print("\n".join(lines_of(run, studies)))
    if chosen.budget is not None:
        print("\n".join(allocation.lines(allocation.allocation(run))))


def prune(chosen: PruneOptions) -> None:
    """Write a smaller checkpoint; a change on other text has an interval where analysis is installed."""
    from twell.workbench.ablations.prune import command as write

    try:
        from twell.analysis.ablations.by_condition import paired_change
    except ImportError:
        write(chosen)
        return
    write(chosen, paired_change)


def text(chosen: options.TextOptions) -> None:
    """Read a text in a run of its own, and print it shaded; the run is removed afterwards."""
    from twell.analysis.exports.terminal import shaded_lines
    from twell.workbench.text.given import GivenTexts
    from twell.workbench.text.streams import STDIN, decoded, stdin_blocks
    from twell.workbench.watching.from_objects import capture

    words = chosen.text if chosen.text != STDIN else "".join(decoded("standard input", stdin_blocks(bytes)))
    if not words.strip():
        raise UserError('Expected some words, got none: give them, as in `twell text "A lichen lives here."`.')
    if sys.stderr.isatty():
        print(f"Loading {chosen.model} …", file=sys.stderr, flush=True)
    given = {name: value for name, value in vars(chosen).items() if name not in ("text", "model", "layer")}
    run = capture(chosen.model, GivenTexts([words]), fired="all", timings=0, **given)
    colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in shaded_lines(run, chosen.layer, colored):
        print(line)


def demo(demo_options: options.DemoOptions) -> None:
    """Capture the bundled model on bundled text, summarise the run and open the dashboard, without a network."""
    if demo_options.app:  # an address that cannot be used is refused before the capture, not after it
        from twell.app.server.launch import check_address, launch

        app_options = options.AppOptions(runs=demo_options.out.parent, port=demo_options.port)
        check_address(app_options.host, app_options.port)
    from twell.analysis.summaries.refresh import summarize
    from twell.workbench.capturing.command import capture
    from twell.workbench.run import manifest as manifests
    from twell.workbench.run.checks.unfinished import set_aside
    from twell.workbench.run.store import open_run

    if (demo_options.out / manifests.FILE).exists():
        existing = open_run(demo_options.out).manifest
        if existing.status == manifests.COMPLETE:
            print(f"Using the demo run that is in {demo_options.out} already (remove the folder to capture it anew).")
        else:
            backup = set_aside(demo_options.out, existing.status)
            print(f"Moved the {existing.status} run in {demo_options.out} to {backup}.")
    if not (demo_options.out / manifests.FILE).exists():
        capture(
            options.CaptureOptions(
                model="builtin:demo",
                text=("builtin:passages", "builtin:python-docs"),
                out=demo_options.out,
                tokens=DEMO_TOKENS,
                examples=DEMO_EXAMPLES,
            )
        )
    summarize(options.SummarizeOptions(runs=(demo_options.out,)))
    if demo_options.app:
        launch(app_options)


for _name, (_dataclass, _target) in COMMANDS.items():
    _help, _examples = help_and_examples(_dataclass)
    cli.command(_name, help=_help, short_help=_help.split("\n")[0], epilog=_examples, context_settings=HELP)(
        command(_dataclass, _target)
    )


def main() -> None:
    """Run the command line. A UserError is printed as one sentence on standard error, with exit code 2."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN)
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, TextIOWrapper):  # a terminal may lack characters, a file's name be no UTF-8
            stream.reconfigure(errors="backslashreplace")
    if debug := "--debug" in sys.argv:
        sys.argv.remove("--debug")
    try:
        if cli(standalone_mode=False) == 130:  # newer typer turns Ctrl-C into this exit code, and returns it
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort, EOFError):
        _stop("Stopped.", 130, debug)
    except UserError as error:
        _stop(str(error), 2, debug)
    except OSError as error:
        if not (sentence := refused(error)):
            raise
        _stop(sentence, 2, debug)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("twell"):
            raise
        _stop(not_installed(error.name), 2, debug)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what click raises for a wrong command line has it
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error)
            sys.exit(2)
        _stop(wrong_value(error) or _missing(error) or wrong_line(error), 2, debug)


def _missing(error: Exception) -> str:
    """Return the sentence for an option or argument that was left out, with an example; "" for other errors."""
    option, context = getattr(error, "param", None), getattr(error, "ctx", None)
    if type(error).__name__ != "MissingParameter" or option is None or context is None:
        return ""
    value = option.metavar or str(option.name).upper()
    wanted = value if option.param_type_name == "argument" else f"{option.opts[0]} {value}"
    known = COMMANDS.get(context.info_name)
    example = help_and_examples(known[0])[1].splitlines()[2].strip() if known else f"{context.command_path} --help"
    return f"Expected {wanted}, got none: give it, as in `{example}`."


def _stop(message: str, code: int, debug: bool) -> None:
    if debug:
        raise
    print_error(f"twell: {escaped(message)}")
    sys.exit(code)
