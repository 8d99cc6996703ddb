"""How the CTAs of a training product share its work: each step once, each piece of a tile awaited, on a CPU.

The header itself runs here: a warp of threads lays out the shares, then each CTA's pieces are read.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from twell.kernels import build

CUDA_RUNTIME = r"""
#pragma once
#include <algorithm>
#include <barrier>
#include <cstdint>
#define __host__
#define __device__
#define __forceinline__ inline
using std::max, std::min;
using cudaStream_t = void*;
struct Index { int x; };
inline thread_local Index threadIdx;
inline Index blockIdx, blockDim{32}, gridDim;
inline std::barrier<> together(32);
inline int lanes[32];
inline void __syncthreads() { together.arrive_and_wait(); }
inline int __shfl_sync(unsigned, int value, int from) {
  lanes[threadIdx.x] = value;
  __syncthreads();
  const int got = lanes[from];
  __syncthreads();
  return got;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __shfl_up_sync(unsigned all, int value, int by) {
  return __shfl_sync(all, value, max(int(threadIdx.x) - by, 0));
}
"""
PROGRAM = r"""
#include <cuda_runtime.h>
#include <cstdio>
#include <map>
#include <optional>
#include <set>
#include <thread>
#include <vector>
#include "hopper/backward/even_shares.cuh"
using namespace twell::hopper;

static EvenSharesMemory memory;

// Returns what is wrong with the shares of a product, or null.
static const char* wrong(const std::vector<int>& steps, int columns, int ctas) {
  const int items = steps.size(), phases = 2;
  gridDim.x = ctas, blockIdx.x = 0;
  std::optional<EvenShares> shares;
  std::vector<std::thread> warp;
  for (int lane = 0; lane < 32; ++lane)
    warp.emplace_back([&, lane] {
      threadIdx.x = lane;
      const EvenShares mine(memory, items, columns, phases, [&](int item) { return steps[item]; });
      if (lane == 0) shares.emplace(mine);
    });
  for (auto& thread : warp) thread.join();
  std::map<std::pair<int, int>, std::vector<SharedPiece>> tiles;  // by phase and tile
  std::map<std::pair<int, int>, int> owners;  // the tile whose arrivals each owner counts, by phase
  std::set<int> slots;
  for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x)
    for (int i = 0; i < shares->count(); ++i) {
      const SharedPiece p = shares->piece(i);
      const int tile = p.column * items + p.item;
      if (p.item < 0 || p.item >= items || p.column / columns != p.phase) return "a tile that is none";
      if (p.whole) {
        if (p.owner != p.final) return "a whole tile of several CTAs";
      } else {
        if (blockIdx.x < p.owner || blockIdx.x > p.final) return "a piece that nobody adds";
        if (!slots.insert(EvenShares::slot(blockIdx.x, p)).second) return "two pieces in one slot";
        const auto [at, first] = owners.emplace(std::pair{p.phase, p.owner}, tile);
        if (!first && at->second != tile) return "two tiles in one count of arrivals";
      }
      tiles[{p.phase, tile}].push_back(p);
    }
  if (tiles.size() != size_t(items) * columns * phases) return "a tile without a piece";
  for (const auto& [at, pieces] : tiles) {
    int next = 0;
    for (const SharedPiece& p : pieces) {
      if (p.first != next || p.end < p.first) return "steps twice or not at all";
      if (p.owner != pieces[0].owner || p.final != pieces[0].final) return "pieces that do not agree whose they are";
      next = p.end;
    }
    if (next != steps[at.second % items]) return "steps that are missing";
    if (int(pieces.size()) != pieces[0].final - pieces[0].owner + 1) return "an arrival that never comes";
  }
  return nullptr;
}

int main() {
  int cases = 0, failures = 0;
  const auto check = [&](const std::vector<int>& steps, int columns, int ctas) {
    ++cases;
    if (const char* what = wrong(steps, columns, ctas); what && ++failures <= 10)
      std::printf("%s: %zu items of %d ... %d steps, %d columns, %d CTAs\n", what, steps.size(), steps[0],
                  steps.back(), columns, ctas);
  };
  for (int ctas : {1, 132})
    for (int columns : {1, 2})
      for (int items : {1, 2, 9, 40})
        for (int steps : {0, 1, 4, 7, 8, 11, 13, 17, 18, 33, 90}) check(std::vector<int>(items, steps), columns, ctas);
  uint32_t random = 1;
  for (int round = 0; round < 80; ++round) {  // items of different lengths, a quarter of them without steps
    std::vector<int> steps(1 + round % 50);
    for (int& of : steps) {
      random = random * 1664525 + 1013904223;
      of = random >> 16 & 3 ? (random >> 20) % (4 << round % 5) : 0;
    }
    check(steps, 1 + round % 4, 132);
  }
  std::printf("%d of %d fail\n", failures, cases);
  return failures != 0 || cases < 256;
}
"""


def test_every_step_is_taken_once_and_every_piece_awaited(tmp_path: Path) -> None:
    """Also where shares are shorter than a tile by far: several borders then fall into one."""
    try:
        compiler = build.find_compiler(cuda=False)
    except build.BuildError as error:
        pytest.skip(str(error))
    (tmp_path / "cuda_runtime.h").write_text(CUDA_RUNTIME, encoding="utf-8")
    (tmp_path / "shares.cpp").write_text(PROGRAM, encoding="utf-8")
    command = [compiler, "-std=c++20", "-O1", "-pthread", "-w", f"-I{tmp_path}", f"-I{build.CSRC}"]
    program = tmp_path / "shares"
    subprocess.run([*command, str(tmp_path / "shares.cpp"), "-o", str(program)], check=True, timeout=280)
    done = subprocess.run([str(program)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout
