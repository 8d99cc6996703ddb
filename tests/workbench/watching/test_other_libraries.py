"""Libraries that put code of their own around a model's modules, as nnsight, accelerate and TransformerLens do."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from support.watched import by_hooks, rows_of, same_state, state_of
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from twell.workbench import ablate, capture, study, use_sparse_ffns, watch
from twell.workbench.errors import UserError

IDS = torch.arange(3, 15).view(3, 4)
EDITED = {  # by how the paths of the modules that are wrapped end, the one whose output is changed
    "": "model.layers.1.mlp.gate_proj",
    "mlp": "model.layers.1.mlp",
    "gate_proj": "model.layers.1.mlp.gate_proj",
    "act_fn": "model.layers.1.mlp.act_fn",
    "down_proj": "model.layers.1.mlp.down_proj",
}


class Controlled:
    """A forward that stands on the instance, and lets what comes out be read and changed, as nnsight has it."""

    def __init__(self, module: nn.Module, path: str, seen: dict[str, Tensor], edits: dict[str, float]) -> None:
        self.beneath, self.path, self.seen, self.edits = module.forward, path, seen, edits

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        output = self.beneath(*args, **keywords)
        if isinstance(output, Tensor):
            output = output + self.edits.get(self.path, 0.0)
            self.seen[self.path] = output
        return output


def controlled(model: nn.Module, only: str = "") -> tuple[dict[str, Tensor], dict[str, float]]:
    """Wrap every module, or one; return what is seen by path, and what is added."""
    seen: dict[str, Tensor] = {}
    edits: dict[str, float] = {}
    for path, module in model.named_modules():
        if path.endswith(only):
            module.forward = Controlled(module, path, seen, edits)  # type: ignore[method-assign]
    return seen, edits


def forwards(model: nn.Module) -> list[Any]:
    return [vars(module).get("forward") for module in model.modules()]


@pytest.mark.parametrize("only", EDITED)
@pytest.mark.parametrize("options", [{}, {"dense": True}, {"threshold": 0}], ids=["", "dense", "threshold"])
def test_a_wrapped_module(small: Any, only: str, options: dict[str, Any]) -> None:
    """What is around it sees and changes the values that it does unwatched, and is there afterwards."""
    seen, edits = controlled(small, only)
    before, wrappers = state_of(small), forwards(small)
    paths = sorted(path for path in map(str, dict(small.named_modules())) if path.endswith(only) and "mlp" in path)
    for edit in (0.0, 0.3):
        with torch.no_grad():
            edits[EDITED[only]] = edit
            nnz: list[np.ndarray] = []
            with small.model.layers[1].mlp.down_proj.register_forward_pre_hook(
                lambda _m, given, nnz=nnz: nnz.append((given[0] != 0).sum(-1).flatten().numpy())
            ):
                expected = small(IDS).logits
            values = dict(seen)
            edits.clear()
            with watch(small, **options) as w:
                edits[EDITED[only]] = edit
                seen.clear()
                torch.testing.assert_close(small(IDS).logits, expected)
            edits.clear()
        assert sorted(path for path in seen if "mlp" in path) == paths
        for path in paths:
            torch.testing.assert_close(seen[path], values[path])
        np.testing.assert_array_equal(w.nnz[:, 1], nnz[0])
    assert same_state(before, state_of(small)) and forwards(small) == wrappers


def test_what_is_around_a_module_is_in_copies(small: Any) -> None:
    controlled(small)
    with watch(small):
        copied = deepcopy(small)
    assert [type(one) for one in forwards(copied)] == [Controlled] * len(forwards(small))


def test_a_generate_of_ones_own(small: Any) -> None:
    """It is heard, and there afterwards, also where two watches share a model."""
    own, asked = small.generate, []
    small.generate = mine = lambda *args, **named: asked.append(1) or own(*args, **named)
    ffns = [{f"model.layers.{layer}.mlp": ("gate_proj", "up_proj", "down_proj")} for layer in range(2)]
    with torch.no_grad(), watch(small, ffns=ffns[0]) as first:
        with watch(small, ffns=ffns[1]):
            pass
        small.generate(IDS, max_new_tokens=2, do_sample=False)
    assert asked and small.generate is mine
    assert set(first.table()["phase"]) == {0, 1}


def test_a_refused_second_watch_leaves_nothing(small: Any) -> None:
    """Neither in the model nor in the way of the next watch."""
    before = state_of(small)
    with watch(small, threshold=0), pytest.raises(UserError, match=r"is not watched yet, .*: leave the first watch"):
        watch(small).__enter__()
    assert same_state(before, state_of(small))
    with torch.no_grad(), by_hooks(small) as hooked:
        small(IDS)
    with torch.no_grad(), watch(small) as w:
        small(IDS)
    assert rows_of(w) == hooked.rows()


def test_a_hook_from_before_in_compiled_code(small: Any, compiler: Callable[..., Any]) -> None:
    """It changes what it does in the model's own code."""
    small.model.layers[1].mlp.act_fn.register_forward_hook(lambda _m, _x, output: output + 1.0)
    compiled = compiler(small, backend="aot_eager")
    with torch.no_grad():
        expected = small(IDS).logits
        with watch(small) as w:
            torch.testing.assert_close(compiled(IDS).logits, expected)
    assert (w.nnz[:, 1] == 32).all() and (w.nnz[:, 0] < 32).all()


def test_a_capture_beside_a_hook(small: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """The model's own code runs, so the run names no kernel and has no times of one."""
    small.resize_token_embeddings(len(tokenizer))
    values: list[Tensor] = []
    small.model.layers[1].mlp.act_fn.register_forward_hook(lambda _m, _x, output: values.append(output))
    run = capture(small, ["the cat sat on the mat"] * 4, tokenizer=tokenizer)
    assert values and run.manifest.kernel["name"] == "torch" and not run.has("timings")
    fired = sum((one.flatten(0, -2) > 0).sum() for one in values[-1:])
    assert run.activity()["nnz_01"].sum() == int(fired)


def test_what_needs_the_weights_alone_refuses_wrapped_maps(small: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    small.resize_token_embeddings(len(tokenizer))
    controlled(small, "down_proj")
    with pytest.raises(UserError, match="got a Linear that another library has wrapped: give the model as"):
        study(small, ["the cat sat on the mat"] * 3, ["ffn@1"], tokenizer=tokenizer)


class Holder:
    """A library's object that holds a model, by a name of its own or behind a property."""

    def __init__(self, model: Any) -> None:
        self._model = model


class Shown(Holder):
    @property
    def model(self) -> Any:
        return self._model


class Bridge(nn.Module):
    """A module whose model is none of its children."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.__dict__["original_model"] = model
        self.scale = nn.Parameter(torch.ones(1))


@pytest.mark.parametrize(("kind", "held"), [(Holder, "_model"), (Shown, "model"), (Bridge, "original_model")])
@pytest.mark.parametrize(
    "use", [lambda one: watch(one).__enter__(), use_sparse_ffns, lambda one: capture(one, ["the cat"])]
)
def test_an_object_that_holds_a_model(small: Any, kind: Any, held: str, use: Callable[[Any], Any]) -> None:
    """Its refusal says by which name."""
    with pytest.raises(UserError, match=rf"got a {kind.__name__}.*: give what it holds as \.{held}\b"):
        use(kind(small))


def test_an_adapters_linear_map_is_told_from_torchs(small: Any) -> None:
    kind = type("Linear", (nn.Linear,), {"__module__": "peft.tuners.lora.layer"})
    small.model.layers[0].mlp.up_proj = kind(16, 32)
    with pytest.raises(UserError, match="got a Linear of peft as up_proj: merge adapters first, as PEFT's"):
        watch(small).__enter__()


def test_maps_that_another_library_has_renamed(small: Any) -> None:
    """No names were given, so the way that counts is named, and it does."""
    for layer in small.model.layers:
        layer.mlp = nn.Sequential(layer.mlp)
    with pytest.raises(UserError, match=r"modules \(0\): load it by from_pretrained, or count .* threshold=0"):
        watch(small).__enter__()
    with torch.no_grad(), watch(small, threshold=0) as w:
        small(IDS)
    assert 0 < w.nnz.mean() < 32


def test_weights_that_are_offloaded(small: Any) -> None:
    """Nothing of them is in memory to be changed, or to be read."""
    small.model.layers[0].mlp.to("meta")
    with pytest.raises(UserError, match='got cpu and meta: load all of it onto one, as device_map="cpu"'):
        watch(small).__enter__()
    with pytest.raises(UserError, match="Expected the weights of layer 0 of LlamaForCausalLM in memory, got them off"):
        ablate(small, {0: [1]}).__enter__()
