"""The options of `twell ablate` and `twell prune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twell.workbench.errors import UserError
from twell.workbench.option_fields import option
from twell.workbench.options import Device


@dataclass(frozen=True, kw_only=True)
class AblateOptions:
    """Take things away from a model's FFNs, and say what the loss says.

    Each condition is a forward pass over the same tokens; its loss stands beside the untouched one, with an interval by
    document. Results go into the run, page What matters shows them, and a study that was stopped continues.

    twell ablate runs/mine
    twell ablate runs/mine --condition weakest:0.5,0.75 --condition ffn@3 --condition random:0.5
    twell ablate runs/mine --neurons 64
    twell ablate runs/mine --budget 0.02
    twell ablate runs/mine --condition neurons:L3/N17,L3/N42 --text other.txt
    twell ablate path/to/model --text book.txt --out runs/book
    """

    target: str = option(
        help="a run's folder; or a model, which then reads --text into --out first", value="MODEL|RUN", argument=True
    )
    condition: tuple[str, ...] = option(
        (),
        help="what is taken away, as KIND[:SHARE,…][@LAYER]: ffn (a layer's FFN), dead, rarest, busiest, random (a "
        "share of the living neurons of each layer), weakest, scattered (a share of each token's firings), smallest "
        "(the share of each layer's values next to 0), shares (the same, one a layer), below:VALUE (|hidden| up to "
        "it), neurons:L3/N17,… or a file of "
        "such names; may be repeated; default: a study of all kinds",
        value="KIND",
    )
    neurons: int = option(
        0,
        help="also estimate every neuron's effect in one pass, by gradient times activation, and measure this many "
        "exactly: half of the greatest estimates, half at random",
        unit="neurons",
        least=0,
    )
    budget: float | None = option(
        None,
        help="divide a change of the loss over the layers: shares of each layer's values next to 0 are measured alone, "
        "then the cheapest that fit together at once, and fewer until what they make together is within it",
        unit="nats a token",
        least=0,
    )
    text: tuple[str, ...] = option((), help="measure on this text; default: the run's own tokens", value="SOURCE")
    out: Path | None = option(None, help="the run's folder, for a model")
    tokens: int | None = option(
        None, help="measure on this many tokens; default: 20 000 on a CPU, 500 000 on a GPU", unit="tokens", least=2
    )
    batch_tokens: int | None = option(
        None, help="size of a batch; default: 4096 on a CPU, 32 768 on a GPU", unit="tokens", least=1
    )
    seed: int = option(0, help="seed of what is taken away at random", least=0, most=2**32 - 1)
    model: str | None = option(
        None, help="the model's folder, if the name in the run's manifest does not lead to it", value="PATH"
    )
    device: Device = option("auto", help="where to run")


@dataclass(frozen=True, kw_only=True)
class PruneOptions:
    """Write a smaller checkpoint without the neurons that never fired.

    It has one width for all layers, the widest that any needs, and plain transformers loads it; with --per-layer each
    layer has its own, and this package alone loads it.

    twell prune path/to/model runs/mine --out models/smaller
    twell prune path/to/model runs/mine --per-layer --least 0.0001 --text other.txt --out models/smaller
    """

    model: str = option(help="a local folder, or builtin:demo", value="MODEL", argument=True)
    run: Path = option(help="a run of that model", value="RUN", argument=True)
    out: Path = option(help="the smaller model's folder")
    least: float = option(0.0, help="remove neurons that fired on less than this share of tokens too", least=0, most=1)
    per_layer: bool = option(False, help="a width for each layer: smaller, but read by this package alone")
    text: tuple[str, ...] = option(
        (), help="also measure the loss on this text, which the run did not see; may be repeated", value="SOURCE"
    )
    tokens: int | None = option(
        None,
        help="read this many tokens of the run, and of --text; default: all of the run, 20 000 (CPU) or 500 000 of "
        "--text",
        unit="tokens",
        least=2,
    )
    device: Device = option("auto", help="where to run")


def refuse_target(options: AblateOptions) -> None:
    """Raise UserError for what is neither a run nor a model with a text and a folder for its run."""
    if not Path(options.target).exists() and not options.text:
        raise UserError(
            f"Expected a run's folder, or a model with --text and --out, got {options.target}: there is no such folder."
        )
    if not options.text or options.out is None:
        raise UserError(
            f"Expected a run, or a model with --text and --out, got {options.target}: give a run's folder, or a text "
            "to read and a folder for the run."
        )
