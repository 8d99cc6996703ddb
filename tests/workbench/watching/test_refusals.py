"""What a watch refuses: one sentence, and the model is as it was."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.watched import same_state, state_of
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from twell.workbench import TwellCallback, ablate, capture, prune, study, threshold, watch
from twell.workbench.errors import UserError
from twell.workbench.watching.hooks import LISTENERS


def sentence(call: Callable[[], Any]) -> str:
    """Return the one sentence that a call is refused with."""
    with pytest.raises(UserError) as error:
        call()
    text = str(error.value)
    assert text.endswith(".") and "\n" not in text and text.startswith(("Expected", "This watch", "LlamaFor")), text
    return text


def enter(*args: Any, **keywords: Any) -> None:
    with watch(*args, **keywords):
        pass


def unfit(value: Any) -> Any:
    """Return what the types refuse already."""
    return value


def test_no_neurons_and_one_are_taken(small: Any) -> None:
    """An empty list silences nothing; a mask and the numbers that it holds silence the same."""
    ids = torch.arange(1, 9)[None]
    mask = torch.zeros(32, dtype=torch.bool)
    mask[5] = True
    with torch.no_grad():
        logits = []
        for neurons in ([], [5], mask, torch.tensor([5])):
            with ablate(small, {1: neurons}):
                logits.append(small(ids).logits)
        assert torch.equal(logits[0], small(ids).logits) and not torch.equal(logits[0], logits[1])
    assert torch.equal(logits[1], logits[2]) and torch.equal(logits[1], logits[3])


class Silu(nn.Module):
    """An FFN with the names of one of ours, that computes something else."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Adapter(nn.Linear):
    """A linear map that adds something to what its weight computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def with_mlp(model: Any, mlp: nn.Module, layer: int = 1) -> Any:
    model.model.layers[layer].mlp = mlp
    return model


def with_map(model: Any, name: str, value: nn.Module) -> Any:
    setattr(model.model.layers[1].mlp, name, value)
    return model


def tied(model: Any) -> Any:
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    return model


def quantised(model: Any) -> Any:
    model.is_quantized = True
    return model


def on_two_devices(model: Any) -> Any:
    model.lm_head.to("meta")
    return model


MODELS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no module": (lambda model: "path/to/model", "got a str"),
    "another activation": (lambda model: with_mlp(model, Silu(model.model.layers[1].mlp)), "got other outputs"),
    "an adapter": (lambda model: with_map(model, "gate_proj", Adapter(16, 32)), "got a Adapter as gate_proj"),
    "experts": (lambda model: with_mlp(model, nn.Linear(16, 16)), "got no up_proj among its modules (none)"),
    "a tied weight": (lambda model: tied(model), "got one that two share"),
    "a shared FFN": (lambda model: with_mlp(model, model.model.layers[0].mlp), "got one that two share"),
    "other sizes": (lambda model: with_map(model, "up_proj", nn.Linear(16, 40)), "cannot run"),
    "two devices": (on_two_devices, "got cpu and meta"),
    "quantised": (quantised, "got quantised ones"),
    "no language model": (lambda model: nn.Linear(3, 3), "Expected ffns="),
}


@pytest.mark.parametrize("case", MODELS)
def test_models(small: Any, case: str) -> None:
    make, expected = MODELS[case]
    model = make(small)
    before = state_of(model) if isinstance(model, nn.Module) and case != "two devices" else None
    assert expected in sentence(lambda: enter(model))
    assert before is None or same_state(before, state_of(model))
    assert not LISTENERS


def test_a_model_of_experts() -> None:
    """Whichever way it is asked for, and it is as it was."""
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 50}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, hidden_act="relu")).eval()
    before = state_of(model)
    assert "got mixtral in MixtralForCausalLM: models with experts cannot" in sentence(lambda: enter(model))
    assert "models with experts" in sentence(lambda: enter(model, threshold=0.1))
    assert "models with experts" in sentence(lambda: ablate(model, {0: [1]}).__enter__())
    assert same_state(before, state_of(model)) and not LISTENERS


def test_no_tokenizer(small: Any) -> None:
    """Tokens are told by their ids; what needs their text says so, and a text is not captured."""
    before = state_of(small)
    with torch.no_grad(), watch(small) as w:
        small(torch.arange(1, 5)[None])
    assert w.table()["text"].tolist() == ["<1>", "<2>", "<3>", "<4>"]
    with pytest.raises(UserError, match=r"^watch holds no vocabulary, .*: give the watch the tokenizer\.$"):
        str(w.text())
    assert "a fast tokenizer for LlamaForCausalLM, found none" in sentence(lambda: capture(small, ["a text"]))
    assert same_state(before, state_of(small))


def test_silu_and_infinite_weights(small: Any) -> None:
    small.config.hidden_act = "silu"
    assert "which has no zeros to count" in sentence(lambda: enter(small))
    small.config.hidden_act = "relu"
    with torch.no_grad():
        small.model.layers[1].mlp.up_proj.weight[3, 4] = torch.inf
    assert "got 1 inf or nan in layer 1" in sentence(lambda: enter(small))


def test_arguments(small: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    cases: dict[str, Callable[[], Any]] = {
        "an empty output folder": lambda: enter(small, out=tmp_path),
        "a module at layers.9": lambda: enter(small, ffns=["layers.9"]),
        "a fast tokenizer": lambda: enter(small, "tokenizer"),
        "probes= as one of counts": lambda: enter(small, probes="all"),
        "layers from 0 to 1": lambda: enter(small, fired=[2]),
        "a threshold of at least 0, got -1": lambda: enter(small, threshold=-1),
        "a threshold of at least 0, got nan": lambda: enter(small, threshold=math.nan),
        "as whole numbers, or a mask of bools, got [1.5]": lambda: ablate(small, {0: [1.5]}).__enter__(),
        "as whole numbers, or a mask of bools, got '17'": lambda: ablate(small, {0: "17"}).__enter__(),
        "neurons by layer, as in {3: [17, 42]}, got a list": lambda: ablate(small, unfit(["L0/N1"])).__enter__(),
        "one a layer, got x": lambda: threshold(small, unfit("x")).__enter__(),
        "to prune, got a str": lambda: prune("models/mine", np.ones((2, 32), bool)),
        "strings, paths or sources, got a int": lambda: capture(small, unfit(5)),
        "a mask of bools [2, 32], got object []": lambda: prune(small, unfit(None)),
        "fired= as layers, such as": lambda: enter(small, fired=unfit(3)),
        "Expected hidden= as LAYERS": lambda: enter(small, hidden=[2]),
        "a threshold of at least 0, got 'x'": lambda: enter(small, threshold=unfit("x")),
        "a layer from 0 to 1 of LlamaForCausalLM, got 'x'": lambda: ablate(small, unfit({"x": [1]})).__enter__(),
        "as whole numbers, or a mask of bools, got None": lambda: ablate(small, unfit({0: None})).__enter__(),
        "This watch has not begun": lambda: watch(small).metrics(),
        "has not begun: call": lambda: watch(small).hidden(0),
        "got a str: load its fast form": lambda: capture(small, ["a text"], tokenizer=unfit("x")),
        "tokens= as an int, got 'x'": lambda: capture(small, ["a text"], tokens="x"),
        "examples= as an int, got 1.5": lambda: capture(small, ["a text"], examples=1.5),
        "probes= as one of counts, neurons, all, got 'x'": lambda: capture(small, ["a text"], probes="x"),
        "loss= as True or False, got 1": lambda: capture(small, ["a text"], loss=1),
        "seed= as an int, got 'x'": lambda: study(small, ["a text"], seed="x"),
        "every= of at least 1 step, got 1.5": lambda: TwellCallback(every=unfit(1.5)),
    }
    before = state_of(small)
    for expected, call in cases.items():
        assert expected in sentence(call), expected
    assert same_state(before, state_of(small))


def test_twice_and_after(small: Any) -> None:
    """A second watch of the model is refused, and the first goes on; one that was left begins no more."""
    ids = torch.arange(1, 9)[None]
    with torch.no_grad(), watch(small) as w:
        assert "not watched yet" in sentence(lambda: enter(small))
        assert "not watched yet" in sentence(lambda: enter(torch.compile(small)))
        small(ids)
        assert len(w.nnz) == 8
    small(ids)
    assert len(w.nnz) == 8
    assert "has not begun" in sentence(w.__enter__)


def test_an_exception_in_the_middle(small: Any) -> None:
    """Of the call that raised nothing is counted; in the with block or out of it, the model is as it was."""
    ids, before = torch.arange(1, 9)[None], state_of(small)
    broken = small.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    watched = watch(small)

    def fail() -> None:
        with torch.no_grad(), watched:
            with pytest.raises(ZeroDivisionError):
                small(ids)
            broken.remove()
            small(ids)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert same_state(before, state_of(small)) and not LISTENERS
    assert len(watched.nnz) == 8
    assert watched.run.manifest.status == "interrupted"


def test_weights_that_move(small: Any) -> None:
    ids = torch.arange(1, 9)[None]
    with torch.no_grad(), watch(small):
        small(ids)
        for layer in small.model.layers:
            layer.mlp.gate_proj.weight = nn.Parameter(layer.mlp.gate_proj.weight.clone())
        assert "got them moved, cast or replaced" in sentence(lambda: small(ids))


def test_weights_that_are_edited(small: Any) -> None:
    """An edit in the watch, of any map and through `.data`, is what the next call computes, and stays."""
    ids = torch.arange(1, 9)[None]
    with torch.no_grad(), watch(small):
        small(ids)
        for layer in small.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(layer.mlp, name).weight.data.mul_(1.5)
        ours = small(ids).logits
    with torch.no_grad():
        assert torch.allclose(small(ids).logits, ours, atol=1e-5)


def test_another_thread_and_a_fork(small: Any) -> None:
    """Calls may come from any thread, one at a time; not from a fork, whose exit leaves the run where it is."""
    ids = torch.arange(1, 9)[None]
    errors: list[BaseException] = []

    def beside(*_: Any) -> None:
        thread = threading.Thread(target=lambda: errors.append(_error(lambda: small(ids))))
        thread.start()
        thread.join()

    with torch.no_grad(), watch(small) as w:
        handle = small.model.layers[0].register_forward_hook(beside)
        small(ids)
        handle.remove()
        child = os.fork()
        if not child:
            error = _error(lambda: small(ids))
            os._exit(0 if "in a fork of it" in str(error) else 1)
        assert os.waitpid(child, 0)[1] == 0
        thread = threading.Thread(target=lambda: small(ids))
        thread.start()
        thread.join()
    assert "in another thread" in str(errors[0])
    assert len(w.nnz) == 16


def _error(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except UserError as error:
        return error
    return AssertionError("nothing was refused")


def test_what_was_not_kept(small: Any) -> None:
    with torch.no_grad(), watch(small) as w:
        assert "no call of the model" in sentence(lambda: w.nnz)
        small(torch.arange(1, 9)[None])
    assert "keeps no firings" in sentence(lambda: w.fired(1))
    assert "keeps no hidden values" in sentence(lambda: w.hidden(1))
    assert "layer from 0 to 1, got 2" in sentence(lambda: w.fired(2))
    assert "layer from 0 to 1, got 'x'" in sentence(lambda: w.fired(unfit("x")))
    with torch.no_grad(), watch(small, rows=False) as w:
        small(torch.arange(1, 9)[None])
    assert "keeps no rows" in sentence(lambda: w.nnz)
    assert w.metrics()["tokens"] == 6  # without the first, and the id that is special
