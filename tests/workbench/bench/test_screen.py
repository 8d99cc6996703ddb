"""What a bench says on the screen: ratios to the same of dense, colours that mean faster or slower, sums."""

from __future__ import annotations

import io
import re
from contextlib import suppress

from rich.console import Console

from twell.kernels.benchmark.operations import COMPILED, DENSE, GATE, UP_DOWN, Operation
from twell.kernels.benchmark.runner import FiringCounts, Result
from twell.workbench.bench.cases import Case
from twell.workbench.bench.screen import Screen, power, stage_sums

OURS, THEIRS = Operation("ffn_sparse", "cpu", 8), Operation("ffn_sparse", "reference", 4)
BOLD, GREEN, RED = "\x1b[1m", "\x1b[1;32m", "\x1b[1;31m"


def case(layer: int, rows: int = 1024) -> Case:
    return Case(f"layer {layer} on text", "text", layer, rows, False, lambda: None)  # type: ignore[arg-type, return-value]


def result(**changes: object) -> Result:
    times = {DENSE: [200.0, 190.0, 220.0], COMPILED: [100.0], GATE: [80.0], OURS: [80.0, 100.0, 160.0], THEIRS: [400.0]}
    about = {"times": times, "errors": {}, "fired": FiringCounts(9.5, 50, {8: 0}), "replayed": set(), "left_out": {}}
    return Result(**{**about, **changes})  # type: ignore[arg-type]


def printed(*cases: tuple[Case, Result], absolute: bool = False, color: bool = False) -> str:
    file = io.StringIO()
    about = {"force_terminal": True, "color_system": "standard"} if color else {}
    with Screen("a bench", len(cases), absolute, Console(file=file, width=160, **about)) as screen:  # type: ignore[arg-type]
        for one, result in cases:
            screen.show(one, result, {operation: {} for operation in result.times})
        screen.close()
    return file.getvalue()


def line(text: str, begins: str) -> str:
    return next(one for one in text.splitlines() if one.strip().startswith(begins))


def test_ratios_are_to_the_same_of_dense_with_the_range_of_turns() -> None:
    gates = {GATE: [80.0], Operation("gate", "cpu", 8): [100.0]}
    page = printed((case(0), result(times=result().times | gates)), absolute=True)
    assert line(page, "cpu ").split()[1:] == ["2.00", "1.25–2.50", "100.0"]
    assert line(page, "reference at C 4").split()[4:] == ["0.50", "0.50–0.50", "400.0"]
    assert line(page, "cpu: gate").split()[2:] == ["0.80", "0.80–0.80", "100.0"]
    assert "nnz 9.5, 1,024 rows" in page
    assert "µs" not in printed((case(0), result()))


def test_colours_are_for_what_is_faster_or_slower_than_dense_beyond_a_doubt() -> None:
    for took, style in ((100.0, GREEN), (195.0, BOLD), (205.0, BOLD), (300.0, RED)):
        page = printed((case(0), result(times={DENSE: [200.0], OURS: [took]})), color=True)
        assert re.search(rf"{re.escape(style)} *{200 / took:.2f}", page)
    page = printed((case(0), result(times={DENSE: [200.0], COMPILED: [100.0]})), color=True)
    assert re.search(rf"{re.escape(BOLD)} *2\.00", page)  # no kernel of ours


def test_layers_add_up_where_all_of_them_have_it() -> None:
    second = result(times={DENSE: [100.0], OURS: [20.0]})
    page = printed((case(0), result()), (case(3), second), absolute=True)
    assert line(page, "2 layers on text") == "2 layers on text: cpu 2.50 ×; dense 0.30 ms"  # 300 over 120
    assert "layers" not in printed((case(0), result()))


def test_the_summary_comes_before_the_blocks_and_they_come_after_an_interruption_too() -> None:
    page = printed((case(0), result()), (case(3), result()))
    lines = [one for one in page.splitlines() if one]
    assert lines[1] == "layer 0 on text, 1,024 rows, nnz 9.5: cpu 2.00 ×, reference at C 4 0.50 ×"
    assert [one.partition(":")[0] for one in lines[2:4]] == ["layer 3 on text, 1,024 rows, nnz 9.5", "2 layers on text"]
    assert lines[4].startswith("× dense: dense time over its own")
    file = io.StringIO()
    with suppress(KeyboardInterrupt), Screen("a bench", 2, False, Console(file=file, width=160)) as stopped:
        stopped.show(case(0), result(), {OURS: {}})
        raise KeyboardInterrupt
    assert line(file.getvalue(), "cpu ").split()[1] == "2.00"


def test_what_is_left_out_is_said_once_for_each_reason() -> None:
    left_out = {"cuda": "no GPU", "hopper": "no GPU", "ffn_compiled": "no compiler"}
    page = printed((case(0), result(left_out=left_out)), (case(1), result(left_out=left_out)))
    assert page.count("without cuda, hopper: no GPU") == page.count("without ffn_compiled: no compiler") == 1


def test_stages_without_their_whole_are_summed() -> None:
    stages = {DENSE: [300.0], Operation("gate", "cpu", 8): [60.0], Operation(UP_DOWN.op, "cpu", 8): [40.0]}
    assert stage_sums(result(times=stages)) == {"cpu: the two": 100.0}
    assert stage_sums(result(times=stages | {OURS: [90.0]})) == {}
    assert line(printed((case(0), result(times=stages))), "cpu: the two").split()[3:] == ["3.00"]


def test_power_is_told_of_what_has_it_with_the_clock_where_that_is_known() -> None:
    sentence = power({
        DENSE: {"watts": 500.4, "millijoules_per_token": 0.0123, "sm_mhz": 1980.0},
        GATE: {},
        OURS: {"watts": 400.0, "millijoules_per_token": 1.5},
    })  # fmt: skip
    assert sentence == "dense 500 W, 0.0123 mJ a token at 1980 MHz; cpu 400 W, 1.5 mJ a token"
    assert re.search(r"^  dense 7 W, 1 mJ", shown_power(), re.MULTILINE)


def shown_power() -> str:
    file = io.StringIO()
    with Screen("a bench", 1, True, Console(file=file, width=160)) as page:
        page.show(case(0), result(), {DENSE: {"watts": 7.0, "millijoules_per_token": 1.0}})
    return file.getvalue()
