"""The command line: `twell COMMAND …`.

A command is a row of `COMMANDS`: the dataclass of its options and the function that does the work, named as text so
that nothing is imported before it is needed. Signatures, help and types come from the dataclass's fields. This is the
one module that may reach into any folder. Errors are one sentence and exit code 2; `--debug` shows the traceback.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any

import typer

from twell.workbench import options
from twell.workbench.errors import UserError

COMMANDS: dict[str, tuple[type, str]] = {
    "demo": (options.DemoOptions, "twell.workbench.cli:demo"),
    "doctor": (options.DoctorOptions, "twell.workbench.doctor:doctor"),
    "capture": (options.CaptureOptions, "twell.workbench.capture:capture"),
    "verify": (options.VerifyOptions, "twell.workbench.verify:verify"),
    "bench": (options.BenchOptions, "twell.workbench.bench:bench"),
    "summarize": (options.SummarizeOptions, "twell.analysis.summary:summarize"),
    "app": (options.AppOptions, "twell.app.launch:launch"),
    "export": (options.ExportOptions, "twell.analysis.export:export"),
    "compare": (options.CompareOptions, "twell.analysis.compare:compare"),
    "train": (options.TrainOptions, "twell.workbench.train:train"),
}

# Every passage and enough of the Python documentation for rankings to mean something; about a minute on two cores.
DEMO_TOKENS = 160_000
DEMO_EXAMPLES = 8  # of each neuron and kind

cli = typer.Typer(
    name="twell",
    help="Which neurons of a sparse language model fire, and what that is worth.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def parameter(item: Field[Any], hint: Any) -> inspect.Parameter:
    """The typer parameter of one option field."""
    unit = item.metadata["unit"]
    text = item.metadata["help"] + (f" [{unit}]" if unit else "")
    required = item.default is MISSING
    if typing.get_origin(hint) is tuple:
        hint = list[typing.get_args(hint)[0]]  # type: ignore[misc]
    kind = typer.Argument(help=text) if item.metadata["argument"] else typer.Option(help=text)
    default = inspect.Parameter.empty if required else item.default
    if default == ():
        default = []
    return inspect.Parameter(
        item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, kind]
    )


def command(dataclass: type, target: str) -> Callable[..., None]:
    """A function with the dataclass's fields as its signature, which calls `module:function` with an instance."""

    def run(**values: Any) -> None:
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        module, function = target.split(":")
        getattr(importlib.import_module(module), function)(dataclass(**values))

    hints = typing.get_type_hints(dataclass)
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter(item, hints[item.name]) for item in fields(dataclass)]
    )
    run.__doc__ = dataclass.__doc__
    return run


def demo(chosen: options.DemoOptions) -> None:
    """Capture, summarise, show: the whole path on what ships with the package, without a network."""
    from importlib.resources import files

    from twell.analysis.summary import summarize
    from twell.workbench import manifest as manifests
    from twell.workbench.capture import capture
    from twell.workbench.store import open_run

    if (chosen.out / manifests.FILE).exists():
        found = open_run(chosen.out).manifest
        if found.status == manifests.COMPLETE:
            print(f"Using the demo run that is in {chosen.out} already (remove the folder to capture it anew).")
        else:
            aside = chosen.out.with_name(f"{chosen.out.name}-{found.status}-{int(time.time())}")
            chosen.out.rename(aside)
            print(f"Moved the {found.status} run in {chosen.out} to {aside}.")
    if not (chosen.out / manifests.FILE).exists():
        capture(
            options.CaptureOptions(
                model=str(files("twell.data") / "demo-model"),
                text=("builtin:passages", "builtin:python-docs"),
                out=chosen.out,
                tokens=DEMO_TOKENS,
                examples=DEMO_EXAMPLES,
            )
        )
    summarize(options.SummarizeOptions(runs=(chosen.out,)))
    if chosen.app:
        from twell.app.launch import launch

        launch(options.AppOptions(runs=chosen.out.parent, port=chosen.port))


for _name, (_options, _target) in COMMANDS.items():
    cli.command(_name)(command(_options, _target))


def main() -> None:
    """Run the command line; every error a person can mend is one sentence on standard error."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    try:
        if cli(standalone_mode=False) == 130:  # newer typer turns Ctrl-C into this exit code, and returns it
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        _stop("Stopped.", 130, debug)
    except UserError as error:
        _stop(str(error), 2, debug)
    except (typer.Abort, EOFError):
        _stop("Stopped.", 130, debug)
    except Exception as error:
        show = getattr(error, "show", None)  # what click raises for a wrong command line knows how to show itself
        if show is None:
            raise
        show()
        sys.exit(2)


def _stop(message: str, code: int, debug: bool) -> None:
    if debug:
        raise
    print(f"twell: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
