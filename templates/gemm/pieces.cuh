// What the blocks of a persistent product work on, piece by piece: each takes every so manieth tile,
// whole; of the last tiles, which would leave blocks idle, all take an equal run of the steps of k.
//
//   5 tiles of 6 steps, 3 blocks, 2 tiles shared         runs of 4 steps
//
//   block 0    tile 3: 0-3                 tile 0        A tile that blocks share has parts: 3 has
//   block 1    tile 3: 4-5   tile 4: 0-1   tile 1        0-3 and 4-5, and blocks 0 and 1 have them.
//   block 2    tile 4: 2-5                 tile 2
//
// What is shared comes first: by the time of the last whole tiles its sums have been added up.
#pragma once
#include "prelude.cuh"

struct Piece {
  int tile, first, steps;  // of k
};

// Of a tile that blocks share: the first of them, and how many they are.
struct Sharers {
  int first, count;
};

// SHARES: whether there are shared tiles. Their steps, one tile behind the other, are an int.
template <bool SHARES>
struct Pieces {
  int blocks, steps;    // how many blocks there are; of k, of a tile
  int whole, position;  // tiles that nobody shares; the next of this block's
  int each, longer;     // steps of a run; the first blocks have one more
  int run, run_end;     // this block's

  __device__ __forceinline__ Pieces(int block, int all, int tiles, int shared, int steps_of_tile)
      : blocks(all), steps(steps_of_tile), whole(tiles - shared), position(block) {
    if (!SHARES) return;
    each = shared * steps / blocks, longer = shared * steps % blocks;
    run = begin(block), run_end = begin(block + 1);
  }

  // The next piece, or false.
  __device__ __forceinline__ bool take(Piece& piece) {
    if (SHARES && run < run_end) {
      const int tile = run / steps, first = run - tile * steps;
      piece = {whole + tile, first, min(steps - first, run_end - run)};
      run += piece.steps;
      return true;
    }
    if (position >= whole) return false;
    piece = {position, 0, steps};
    position += blocks;
    return true;
  }

  // Who works on a tile.
  __device__ __forceinline__ Sharers sharers(int tile) const {
    const int from = (tile - whole) * steps, first = owner(from);
    return {first, owner(from + steps - 1) - first + 1};
  }

 private:
  __device__ __forceinline__ int begin(int block) const {
    return block * each + min(block, longer);
  }

  __device__ __forceinline__ int owner(int step) const {
    const int of_longer = longer * (each + 1);
    return step < of_longer ? step / (each + 1) : longer + (step - of_longer) / each;
  }
};
