"""A study from Python: conditions over texts on a model object, whose table `analysis.effects` returns.

    run = study(model, ["a text", "another"], ["weakest:0.5", "ffn@3"])
    effects(run)    # a DataFrame: a row a condition, with its change of the loss and an interval

It composes with the contexts: inside `ablate(model, …)` or `threshold(model, …)` everything is measured beside a model
that is changed so already, and a model that `prune` returned is one like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn
from transformers import PreTrainedTokenizerFast

from twell.workbench.ablations.command import measure, model_of
from twell.workbench.ablations.options import AblateOptions
from twell.workbench.errors import UserError
from twell.workbench.models.attach import unwrapped
from twell.workbench.models.own_code import has_zeros, own_of
from twell.workbench.option_fields import check_bounds, plain_values, python_names
from twell.workbench.run.store import Run
from twell.workbench.text.sources import TextSource
from twell.workbench.watching.from_objects import capture, language_model


@python_names(AblateOptions, text="texts", condition="conditions")
def study(
    model: nn.Module | str | Path,
    texts: str | Path | TextSource | Sequence[str | Path | TextSource],
    conditions: str | Sequence[str] = (),
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    out: str | Path | None = None,
    threshold: float | None = None,
    neurons: int = 0,
    tokens: int | None = None,
    batch_tokens: int | None = None,
    seed: int = 0,
) -> Run:
    """Read texts with a model, take things away from it on the same tokens, and return the run with both.

    model, texts, tokenizer, out: as in `capture`; conditions: as `twell ablate --condition` spells them, default: all
    threshold: firing is |hidden| above it; default: the ReLU's own zeros, or 0 where a model has none
    neurons, tokens, batch_tokens, seed: as `twell ablate` takes them

    Raises UserError for a model, a text or a condition that cannot be used; the model is then as it was.
    """
    listed = [conditions] if isinstance(conditions, str) or not isinstance(conditions, Iterable) else conditions
    given = tuple(listed)
    if wrong := [one for one in given if not isinstance(one, str)]:
        raise UserError(f"Expected conditions as text, such as ffn@3, got {wrong[0]!r}.")
    options = plain_values({"neurons": neurons, "tokens": tokens, "batch_tokens": batch_tokens, "seed": seed})
    chosen = AblateOptions(target="", condition=given, **options)
    check_bounds(chosen, from_python=True)
    is_object = isinstance(model, nn.Module)
    if isinstance(model, nn.Module) and threshold is None and not has_zeros(language_model(model)):
        threshold = 0.0
    run = capture(model, texts, tokenizer=tokenizer, out=out, threshold=threshold, timings=0)
    name = str(run.manifest.model["name"])
    own = own_of(name, unwrapped(model)) if is_object else model_of(run, str(model), "auto")
    return measure(run, own, chosen)
