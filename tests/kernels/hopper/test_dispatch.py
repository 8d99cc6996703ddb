"""Which path and tiles `hopper` takes without a plan: it chooses in plain C++, which runs where there is no GPU."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.gpu_checks import NEIGHBOURS
from support.sanitized import ON_132

from twell.kernels import build
from twell.kernels.backends import hopper_libraries
from twell.kernels.build import Source

Tile = tuple[int, int]  # rows and neurons of the gate and up products, or a cluster's outputs of `down` and its CTAs
Case = tuple[int, int, int, int]  # rows, d_model, d_ff; clusters of three that run at once
PATHS = ("rows16", "rows64", "tiled")
PROGRAM = """
#include <cstdio>
#include "hopper/mid_rows/down.cuh"
#include "hopper/dispatch.h"
using namespace twell::hopper;
int main() {
  for (const auto& tile : kCtaTiles) printf("%d %d ", tile.rows, tile.neurons);
  puts("");
  for (const auto& way : kDownShapes) printf("%d %d ", way.each, way.splits);
  puts("");
  Ffn f{};
  for (const int d_ff : {6336, 6344, 8448, 8456})
    for (int turned = 0; turned < 8; ++turned) {
      f.d_ff = d_ff, choose_rows16(f, {turned % 2 > 0, turned / 2 % 2 > 0, turned > 3}, 132);
      printf("%d %d ", f.leaves_dense + 2 * f.wide_groups, f.next_group);
    }
  puts("");
  constexpr int kSizes[][2] = {{1024, 16384}, {1025, 9984}, {1025, 9985}, {3840, 2816}, {3840, 3072}, {131072, 3072}};
  for (const void* up : {static_cast<const void*>(&f), static_cast<const void*>(nullptr)})
    for (const auto [rows, d_ff] : kSizes) {
      f.w_up = up, f.rows = rows, f.d_ff = d_ff, f.d_model = 768;
      f.blocks = (rows + kBlockRows - 1) / kBlockRows, f.tiles = (d_ff + kTile - 1) / kTile;
      printf("%d ", persists(f) ? choose_cta_tile(f, 132) == CtaTile{128, 256} ? 1 : 2 : 0);
    }
  puts("");
  f.w_up = &f;
  for (int threes; scanf("%d %d %d %d", &f.rows, &f.d_model, &f.d_ff, &threes) == 4;) {
    f.blocks = (f.rows + kBlockRows - 1) / kBlockRows;
    const auto tile = choose_cta_tile(f, 132);
    const auto way = choose_down_shape(f, {0, 132, 66, threes});
    printf("%d %d %d %d %d\\n", tile.rows, tile.neurons, way.each, way.splits, static_cast<int>(path_of(f, 132)));
  }
}
"""


@dataclass(frozen=True)
class Chosen:
    tile: Tile
    way: Tile
    path: str


class Choosers:
    """The launchers' choosers, compiled. tiles, ways: all that there are; turned: of models on both sides of
    where wide groups pay, by choice turned around: dense groups' down weights left alone + 2 wide groups; next;
    persists: of gated and of plain calls, 1 if CTAs take several tiles, and `down` knows which; else 0."""

    def __init__(self, program: Path) -> None:
        self.program = program
        *pairs, self.persists = self.numbers("")
        tiles, ways, self.turned = ([*zip(line[::2], line[1::2], strict=True)] for line in pairs)
        self.tiles, self.ways = {*tiles}, {*ways}

    def numbers(self, given: str) -> list[list[int]]:
        done = subprocess.run([self.program], input=given, capture_output=True, text=True, check=True)
        return [[*map(int, line.split())] for line in done.stdout.splitlines()]

    def of(self, cases: Iterable[Case]) -> list[Chosen]:
        _, _, _, _, *lines = self.numbers("\n".join(" ".join(map(str, case)) for case in cases))
        return [Chosen((a, b), (c, d), PATHS[path]) for a, b, c, d, path in lines]


@pytest.fixture(scope="module")
def choosers(tmp_path_factory: pytest.TempPathFactory) -> Choosers:
    try:
        nvcc = build.find_compiler(cuda=True)
    except build.BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("choices")
    source, program = folder / "choices.cu", folder / "choices"
    source.write_text(PROGRAM, encoding="utf-8")
    sources = hopper_libraries.library().sources
    flags = next(source.flags for source in sources if source.path == "hopper/mid_rows/launch.cu")
    command = [nvcc, *build.compile_command(Source(str(source), flags), cuda=True), str(source), "-o", str(program)]
    subprocess.run(command, check=True)
    return Choosers(program)


def test_every_tile_and_way_of_down_is_watched(choosers: Choosers) -> None:
    """By the sanitizer's calls; but for 256 outputs of a cluster, which take unions of over 16 384."""
    taken = choosers.of((*shape, 39) for shape in ON_132)
    assert {one.tile for one in taken} == choosers.tiles
    assert {one.way for one in taken} == choosers.ways - {(256, 2)}
    assert {one.path for one in taken} == {"tiled"}


def test_a_call_turns_each_choice_around_by_itself(choosers: Choosers) -> None:
    """Groups are wide only in models that have more than a wave of the others and at most one of these."""
    leaves, after, wide = (choosers.turned[8][0] & 1, choosers.turned[8][1], choosers.turned[8][0] >> 1)
    assert after in (0, 132)
    for at, pays in enumerate((False, True, True, False)):
        assert choosers.turned[8 * at : 8 * at + 8] == [
            ((leaves ^ a) + 2 * (pays and wide ^ c), after ^ (132 * b)) for c in (0, 1) for b in (0, 1) for a in (0, 1)
        ]


def test_ctas_of_plain_calls_take_several_tiles_where_blocks_have_all_rows_and_tiles_are_many(
    choosers: Choosers,
) -> None:
    assert choosers.persists == [0] * 6 + [0, 0, 1, 0, 1, 1]


def test_neighbouring_tiles_are_as_wide_as_the_test_of_them_takes_them_for(choosers: Choosers) -> None:
    taken = choosers.of((n, 128, d_ff, 39) for n, _, d_ff in NEIGHBOURS)
    assert [one.tile[1] for one in taken] == [tile for _, tile, _ in NEIGHBOURS]


def test_the_fastest_that_was_measured(choosers: Choosers) -> None:
    """On an H200, fully dense, among all that were forced."""
    fastest: dict[Case, tuple[Tile, Tile]] = {
        (1536, 512, 2048, 39): ((128, 224), (128, 2)),  # few steps: what stands around them counts
        (2304, 512, 2048, 39): ((256, 176), (128, 1)),
        (1024, 1024, 4096, 39): ((128, 256), (128, 2)),
        (128, 2048, 5632, 39): ((128, 48), (64, 3)),
        (512, 2048, 5632, 39): ((128, 176), (128, 2)),
        (1024, 2048, 5632, 39): ((256, 176), (128, 1)),
        (1536, 2048, 5632, 39): ((128, 256), (192, 1)),
        (64, 2560, 6912, 39): ((128, 64), (64, 2)),  # 40 clusters of three are two waves
        (64, 2560, 6912, 40): ((128, 64), (64, 3)),
        (16, 4096, 14_336, 39): ((128, 112), (64, 2)),
        (640, 4096, 14_336, 39): ((128, 192), (160, 1)),
    }
    taken = choosers.of(fastest)
    assert {case: (one.tile, one.way) for case, one in zip(fastest, taken, strict=True)} == fastest


@pytest.mark.parametrize(
    ("d_ff", "up_to_16", "up_to_64"),
    [
        (64, "rows16", "rows64"), (2048, "rows16", "rows64"), (5632, "rows16", "rows64"), (6336, "rows16", "rows64"),
        (6344, "rows16", "tiled"), (6912, "rows16", "tiled"), (8192, "rows16", "tiled"), (11_008, "rows16", "tiled"),
        (12_672, "rows16", "tiled"), (12_680, "tiled", "tiled"), (14_336, "tiled", "tiled"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("d_model", [64, 2048, 4096])
def test_the_path_of_up_to_64_rows(choosers: Choosers, d_model: int, d_ff: int, up_to_16: str, up_to_64: str) -> None:
    taken = choosers.of((n, d_model, d_ff, 39) for n in range(1, 66))
    assert [one.path for one in taken] == [up_to_16] * 16 + [up_to_64] * 48 + ["tiled"]
