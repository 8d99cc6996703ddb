"""A model of one's own whose FFNs are replaced: it computes what it did, and what is refused is as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.captures import save_model
from support.watched import same_state, state_of
from torch import Tensor, nn

from twell.kernels.modules import SparseFFN
from twell.workbench import use_sparse_ffns, watch
from twell.workbench.errors import UserError


def replaced(model: nn.Module) -> int:
    """Return how many FFNs are ours."""
    return sum(isinstance(module, SparseFFN) for module in model.modules())


def outputs(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Return logits of a batch, and what is generated after it."""
    with torch.no_grad():
        return model(**batch).logits, model.generate(**batch, max_new_tokens=6, do_sample=False, pad_token_id=0)


def assert_runs_sparse(model: Any, batch: Any) -> None:
    """Replace a model's FFNs, and expect the outputs that it had. The model is float64."""
    logits, generated = outputs(model, batch)
    assert use_sparse_ffns(model) is model and replaced(model) == model.config.num_hidden_layers
    sparse_logits, sparse_generated = outputs(model, batch)
    torch.testing.assert_close(sparse_logits, logits, rtol=1e-9, atol=1e-9)
    assert torch.equal(sparse_generated, generated)


def test_outputs_are_those_of_the_model(model: Any, batch: Any) -> None:
    assert_runs_sparse(model, batch)


def test_families(family: Any, batch: Any) -> None:
    assert_runs_sparse(family, batch)


def test_it_can_be_watched_and_replaced_again(model: Any, tokenizer: Any, batch: Any) -> None:
    with watch(model, tokenizer) as before:
        model(**batch)
    use_sparse_ffns(model)
    ours = [module for module in model.modules() if isinstance(module, SparseFFN)]
    with watch(model, tokenizer) as after, torch.no_grad():
        model(**batch)
    assert after.by_layer()["mean"].tolist() == before.by_layer()["mean"].tolist()
    use_sparse_ffns(model)
    assert [module for module in model.modules() if isinstance(module, SparseFFN)] == ours
    assert all(ffn.probe.probes == "none" for ffn in ours)


def test_compiled_it_stays_one_graph(small: Any, compiler: Callable[..., Any]) -> None:
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        expected = small(ids).logits
        compiled = compiler(use_sparse_ffns(small), backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(ids).logits, expected)


class Own(nn.Module):
    """An FFN that no library knows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.activation = nn.Linear(16, 64), nn.Linear(64, 16), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.activation(self.inner(x)))


class Holder(nn.Module):
    """A module with one FFN in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Own()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_a_module_of_ones_own() -> None:
    module, x = Holder(), torch.randn(3, 16)
    with torch.no_grad():
        expected = module(x)
        use_sparse_ffns(module, ffns={"first": ("inner", "outer")})
        assert isinstance(module.first, SparseFFN) and module.first is module.second
        torch.testing.assert_close(module(x), expected)


class Called(nn.Module):
    """A block that calls its FFN by the name that its input has there."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(hidden_states=x) + self.ffn(x)


class Hidden(Own):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


def test_the_input_keeps_its_name(compiler: Callable[..., Any]) -> None:
    module, x = Called(), torch.randn(3, 16)
    with torch.no_grad():
        expected = module(x)
        use_sparse_ffns(module, ffns={"ffn": ("inner", "outer")})
        torch.testing.assert_close(module(x), expected)
        torch.testing.assert_close(deepcopy(module)(x), expected)
        torch.testing.assert_close(module.ffn(x=x), module.ffn(x))
        with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
            module.ffn(other=x)
        torch.testing.assert_close(compiler(module, backend="aot_eager", fullgraph=True)(x), expected)


def test_a_name_of_its_own_costs_others_nothing(small: Any) -> None:
    use_sparse_ffns(small)
    assert [type(module) for module in small.modules() if isinstance(module, SparseFFN)] == [SparseFFN] * 2


class Silu(nn.Module):
    """An FFN with the names of one of ours, that computes something else."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = own.gate_proj, own.up_proj, own.down_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def test_what_is_refused_is_as_it_was(small: Any) -> None:
    small.model.layers[1].mlp = Silu(small.model.layers[1].mlp)  # the last one: the first has been made by then
    before = state_of(small)
    with pytest.raises(UserError, match="layer 1 of LlamaForCausalLM to compute"):
        use_sparse_ffns(small)
    assert same_state(before, state_of(small))


@pytest.mark.parametrize("where", ["mlp", "mlp.up_proj"])
def test_hooks_are_not_lost(small: Any, where: str) -> None:
    hook = small.model.layers[1].get_submodule(where).register_forward_hook(lambda _module, _x, y: y + 1)
    with pytest.raises(UserError, match="without hooks and with their class's forward, got others at layer 1"):
        use_sparse_ffns(small)
    hook.remove()
    use_sparse_ffns(small)
    assert replaced(small) == 2


def test_a_model_that_is_replaced_is_not_saved(small: Any, tmp_path: Path) -> None:
    copy = deepcopy(use_sparse_ffns(small))
    for model in (small, copy):
        with pytest.raises(UserError, match="Expected a model with FFNs of its own to save"):
            model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists() and replaced(copy) == 2


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.LeakyReLU(), nn.GELU()])
def test_other_activations_are_told_apart(activation: nn.Module) -> None:
    module = nn.Sequential(Own())
    module[0].activation = activation
    with pytest.raises(UserError, match="or make a model of FFNs with a ReLU, as `twell train"):
        use_sparse_ffns(module, ffns={"0": ("inner", "outer")})


@pytest.mark.parametrize(
    ("act", "dtype"),
    [
        (nn.LeakyReLU(0.01), torch.bfloat16),
        (nn.LeakyReLU(0.01), torch.float16),
        (nn.ELU(0.005), torch.bfloat16),
        (nn.LeakyReLU(1e-6), torch.float32),
    ],
)
def test_what_leaks_too_little_for_outputs_to_tell(small: Any, act: nn.Module, dtype: torch.dtype) -> None:
    module = nn.Sequential(Own()).to(dtype)
    small.to(dtype)
    use_sparse_ffns(deepcopy(module), ffns={"0": ("inner", "outer")})
    use_sparse_ffns(deepcopy(small))
    module[0].activation = small.model.layers[1].mlp.act_fn = act
    before = state_of(small)
    with pytest.raises(UserError, match="got hidden values other than 0 of negative ones"):
        use_sparse_ffns(module, ffns={"0": ("inner", "outer")})
    for enter in (use_sparse_ffns, lambda model: watch(model).__enter__()):
        with pytest.raises(UserError, match=r"layer 1 of LlamaForCausalLM to compute .* got hidden values other than"):
            enter(small)
    assert same_state(before, state_of(small))


def test_a_leak_between_modules_that_a_layer_calls_one_by_one(tmp_path: Path, load_object: Callable[..., Any]) -> None:
    model = load_object(save_model(tmp_path / "opt", "opt"), torch.bfloat16)
    use_sparse_ffns(deepcopy(model))
    model.model.decoder.layers[0].activation_fn = nn.LeakyReLU()
    with pytest.raises(UserError, match=r"layer 0 of opt to compute .* got hidden values other than 0"):
        use_sparse_ffns(model)


def test_refusals(small: Any) -> None:
    own = Own()
    with pytest.raises(UserError, match="which is no model of transformers"):
        use_sparse_ffns(own)
    with pytest.raises(UserError, match="Expected FFNs within Own, got its own path in ffns="):
        use_sparse_ffns(own, ffns={"": ("inner", "outer")})
    with watch(small), pytest.raises(UserError, match="leave the first watch"):
        use_sparse_ffns(small)
    with watch(small, threshold=0.01), pytest.raises(UserError, match="first leave the watch"):
        use_sparse_ffns(small)
    assert replaced(small) == 0
    small.config.hidden_act = "silu"
    with pytest.raises(UserError, match="got hidden_act 'silu', which has no zeros to count: make a model"):
        use_sparse_ffns(small)


def test_an_ffn_that_takes_more_than_its_input() -> None:
    """What else it is called with, a sparse one could not heed."""

    class Scaled(Own):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x) * scale

    module = nn.Sequential(Scaled())
    with pytest.raises(UserError, match=r"that take their input alone, got forward\(x, scale\) at 0"):
        use_sparse_ffns(module, ffns={"0": ("inner", "outer")})
    assert isinstance(module[0], Scaled)


def test_sizes_that_the_kernels_do_not_take() -> None:
    module = nn.Sequential(Own())
    module[0].inner, module[0].outer = nn.Linear(16, 60), nn.Linear(60, 16)
    with pytest.raises(UserError, match=r"in multiples of 8 in Sequential.*got 60 × 16: fill them up with neurons of"):
        use_sparse_ffns(module, ffns={"0": ("inner", "outer")})


def test_a_kernel_that_gives_way_is_said(small: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_sparse_ffns(deepcopy(small), kernel="reference")
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match=r"^kernel='cuda' gives way to cpu: .*cuda"):
            use_sparse_ffns(deepcopy(small), kernel="cuda")
        with pytest.warns(UserWarning, match=r"^kernel='hopper' gives way"), watch(small, kernel="hopper"):
            pass
