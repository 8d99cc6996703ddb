"""`twell bench --whole`: the steps that it times are those of the model, on the FFNs of the side that it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from support.captures import save_model
from torch._dynamo.testing import CompileCounterWithBackend

from twell.analysis.exports import bench_cases
from twell.workbench.bench import decoding, whole
from twell.workbench.bench.command import bench
from twell.workbench.bench.decoding import Decoder, generator
from twell.workbench.bench.options import BenchOptions
from twell.workbench.bench.sides import LinearFFN
from twell.workbench.errors import UserError
from twell.workbench.models.load import LoadedModel, load


@pytest.fixture(scope="module")
def loaded(tiny: Path) -> LoadedModel:
    return load(str(tiny), device="cpu")


@pytest.fixture
def prompts(loaded: LoadedModel) -> torch.Tensor:
    return torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(1))


def test_steps_generate_what_transformers_generates(loaded: LoadedModel, prompts: torch.Tensor) -> None:
    expected = generator(loaded, prompts, 6)()[:, 7:]
    assert expected.unique().numel() > 2
    decoder = Decoder(loaded, prompts, 5, compiled=False)
    for _ in range(2):  # the second time over what the first has left in the cache
        decoder.generate()
        assert decoder.ids[:, 0].tolist() == expected[:, 5].tolist()
    again = generator(loaded, prompts, 6)()[:, 7:]  # the model is what it was
    assert again.tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["opt", "nemotron", "qwen3", "mistral"])
def test_steps_of_other_families(family: str, prompts: torch.Tensor, tmp_path: Path) -> None:
    """A step has no mask, whatever a family makes of one: learned positions, fewer heads for keys, windows."""
    act = {"hidden_act": "relu2"} if family == "nemotron" else {}
    model = load(str(save_model(tmp_path / family, family, **act)), device="cpu")
    expected = generator(model, prompts, 6)()[:, 7:]
    decoder = Decoder(model, prompts, 5, compiled=False)
    decoder.generate()
    assert decoder.ids[:, 0].tolist() == expected[:, 5].tolist()


def test_one_trace_of_a_layer_serves_steps_of_all_lengths(
    loaded: LoadedModel, prompts: torch.Tensor, monkeypatch: Any
) -> None:
    expected = generator(loaded, prompts, 6)()[:, 7:]
    torch.compiler.reset()
    traces = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(
        decoding, "compiled_layer", lambda block: torch.compile(block, dynamic=False, fullgraph=True, backend=traces)
    )
    decoder = Decoder(loaded, prompts, 5, compiled=True)
    decoder.generate()
    assert decoder.ids[:, 0].tolist() == expected[:, 5].tolist()
    assert loaded.layers > 1 and traces.frame_count == 1


def test_each_side_runs_its_own_ffns_and_both_compute_the_same(loaded: LoadedModel, prompts: torch.Tensor) -> None:
    sides, outputs = whole.Sides(loaded), {}
    for side in (whole.DENSE, whole.SPARSE):
        with torch.inference_mode(), sides.of(side):
            kinds = {type(module).__name__ for module in loaded.body.modules()}
            assert ("LinearFFN" in kinds, "SparseFFN" in kinds) == (side == whole.DENSE, side == whole.SPARSE)
            outputs[side] = loaded.body(input_ids=prompts).last_hidden_state
    torch.testing.assert_close(outputs[whole.DENSE], outputs[whole.SPARSE], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [4, 5])
def test_both_sides_make_every_token_of_a_turn_once(
    loaded: LoadedModel, prompts: torch.Tensor, tokens: int, monkeypatch: Any
) -> None:
    clock = iter(range(1, 1000))  # the n-th token of all takes n microseconds
    monkeypatch.setattr(decoding, "start_timer", lambda _device: lambda: lambda: float(next(clock)))
    sides, length = whole.Sides(loaded), prompts.shape[1]
    made: list[tuple[str, int]] = []
    for module, side in ((loaded.ffns[0], whole.SPARSE), (sides._holders[0][3], whole.DENSE)):
        module.register_forward_hook(lambda _m, x, _y, side=side: made.append((side, x[0].shape[1])))
    times = decoding.generation_times(sides, prompts, tokens, 2)
    generations = [made[i : i + tokens] for i in range(0, len(made), tokens)]
    assert len(generations) == 6 and [rows for _, rows in made[:tokens]] == [length] + [1] * (tokens - 1)
    order = [[whole.DENSE, whole.SPARSE][i % 2] for i in range(tokens)]
    other = [{whole.DENSE: whole.SPARSE, whole.SPARSE: whole.DENSE}[side] for side in order]
    for i, generation in enumerate(generations):
        assert [side for side, _ in generation] == (other if i % 2 else order)
    took = {whole.DENSE: [0.0, 0.0], whole.SPARSE: [0.0, 0.0]}
    for i in range(2 * tokens, 6 * tokens):  # the first turn's are not counted
        took[made[i][0]][i // tokens // 2 - 1] += i + 1
    assert times == took


def test_after_a_generation_that_fails_the_model_is_sparse(
    loaded: LoadedModel, prompts: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    sides = whole.Sides(loaded)
    monkeypatch.setattr(loaded.model, "generate", fail)
    with pytest.raises(MemoryError) as failure:  # whose traceback keeps the frames, and what they hold
        decoding.generation_times(sides, prompts, 6, 1)
    assert failure and not any(isinstance(module, LinearFFN) for module in loaded.body.modules())


class FiftyWatts:
    """A gauge of a device that takes 50 W, whatever it does."""

    reads = True

    def __init__(self, _device: torch.device) -> None: ...

    def window(self, operation: Callable[[], None]) -> tuple[None, float]:
        operation()
        return None, 50.0


def test_rows_of_the_table(tiny: Path, texts: tuple[str, ...], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(whole, "Gauge", FiftyWatts)
    monkeypatch.setattr(whole, "TURNS", {"cpu": 2})
    monkeypatch.setattr(whole, "PROMPT", {"cpu": 5})
    monkeypatch.setattr(whole, "TOKENS", {"cpu": 3})
    out = tmp_path / "whole.parquet"
    rows = bench(
        BenchOptions(
            whole=True, model=str(tiny), text=texts, rows="40", batches="1,2", compile=False, energy=True, out=out
        )
    )
    assert pq.read_table(out).num_rows == len(rows)
    sides = {f"{op}_{side}" for op in ("generate", "generate_graphed", "step") for side in ("dense", "sparse")}
    by_case = {name: {row["op"] for row in rows if row["case"] == name} for name in {row["case"] for row in rows}}
    passes = {"whole_dense", "whole_sparse"}
    assert by_case == {
        "whole model on text, 40 rows": passes,
        "whole model on uniform ids, 40 rows": passes,
        "whole model, decoding 1 sequence": sides,
        "whole model, decoding 2 sequences": sides,
    }
    for row in rows:
        assert (row["layer"], row["repeats"], row["ffn"], row["graph"]) == (-1, 2, "gated", False)
        assert (row["kernel"] == "torch") == row["op"].endswith("dense")
        assert row["rows"] == int(re.findall(r"(\d+) (?:rows|sequence)", row["case"])[0]), "of a call of an FFN"
    figures = {(row["case"][-11:], row["op"], row["metric"]): row for row in rows}
    for case, op, tokens in (("2 sequences", "step_sparse", 2), ("2 sequences", "generate_dense", 6)):
        time, rate = (figures[case, op, metric] for metric in ("microseconds", "tokens_per_second"))
        assert 0 < time["low"] < time["value"] < time["high"]
        assert [rate[end] * time[of] for end, of in (("value", "value"), ("low", "high"), ("high", "low"))] == (
            pytest.approx([tokens * 1e6] * 3)
        )
    step = figures["2 sequences", "step_sparse", "microseconds"]["value"]
    assert figures["2 sequences", "step_sparse", "millijoules_per_token"]["value"] == pytest.approx(50 * step / 2000)
    gauged = {(row["case"], row["op"]) for row in rows if row["metric"] == "watts"}
    decoding_cases = [name for name in by_case if "decoding" in name]
    steps = {(name, f"step_{side}") for name in decoding_cases for side in ("dense", "sparse")}
    assert gauged == steps | {("whole model on text, 40 rows", op) for op in passes}, "of text, which both sides read"
    assert all(re.match(bench_cases.OTHERS, row["op"]) for row in rows)  # tables of single FFNs leave them out


def test_options_that_do_not_fit(tiny: Path) -> None:
    with pytest.raises(UserError, match="beside a model alone"):
        bench(BenchOptions(whole=True, shape="64,128"))
    with pytest.raises(UserError, match="--batches, got 0"):
        bench(BenchOptions(whole=True, model=str(tiny), batches="0"))
