#pragma once

#include <cstdint>

// Arguments of the loops of convolutions, which those of all instruction sets share.
namespace gradfuse::cpu {

// Rows and columns that are multiplied with each other, over places that lie one after the other, in one segment or in
// several that lie a pitch apart.
template <class T>
struct Products {
  const T* rows;
  int64_t row_pitch;
  int64_t row_count;
  const T* const* columns;  // and kColumnsAtOnce - 1 more, which may be any of them
  int64_t column_count;
  bool columns_first;  // whether the columns of a tile stay in the cache while rows pass, not the other way round
  T* sums;             // (row_count, column_count), with a pitch
  int64_t sums_pitch;
  int64_t segment_pitch;
  bool pairs;  // whether numbers are pairs of bfloat16, whose products are added up
};

// The weights of a tile of channels, and where they are packed to: plane by plane, and there by channel of the small
// side, tap of the plane and channel of the tile.
template <class T>
struct FilterTile {
  const T* weights;  // of the first channel of the small side: (channels, taps)
  int64_t pitch;     // from one channel of the small side to the next
  int64_t small_channels;
  int64_t count;              // of weights that are there
  const int64_t* order;       // the weight for each place of what is packed, or -1 for 0
  const int64_t* plane_ends;  // in `order`
  int64_t plane_count;
  T* packed;
};

// Planes that are added up, each shifted for each of some taps and multiplied with a weight.
template <class T>
struct Filters {
  const T* planes;
  int64_t plane_pitch;
  int64_t plane_count;
  const int64_t* shifts;
  int64_t tap_count;
  const T* weights;      // (plane_count, tap_count, channels at once), or (channels at once, plane_count, tap_count)
  int64_t weight_pitch;  // of the second form, from one channel to the next; 0 for the first
  int64_t weight_skip;   // how many taps have weights but are left out, between those of two planes
  int64_t place_count;
  T* sums;  // (channels at once, places), with a pitch
  int64_t sums_pitch;
  bool pairs;  // as in Products
};

// Neighbouring windows, where they are in packed planes, and where in a panel.
struct Piece {
  int64_t from;
  int64_t to;
  int64_t count;
};

// Windows that are copied out of packed planes: for each (plane, tap) a row of kPanel.
template <class T>
struct Panel {
  const T* planes;
  int64_t plane_pitch;
  int64_t plane_count;
  const int64_t* shifts;
  int64_t tap_count;
  const Piece* pieces;
  int64_t piece_count;
  T* to;
};

// Rows of several items, `item_pitch` apart, and where they lie packed: each place has an element of every item, and
// those of `at_once` items lie side by side.
template <class T, class Packed>
struct ItemRows {
  T* rows;
  int64_t item_pitch;
  int64_t items;
  int64_t step;   // from one element of a row to the next
  int64_t width;  // of a row
  Packed* packed;
  int64_t at_once;
  int64_t ahead;  // how far from a row the one lies that is asked for early, as it comes next
};

// What is done to the sums of a channel: a bias is added, and they are at least so much.
template <class T>
struct Finish {
  T bias;
  T least;
};

constexpr int64_t kChannelsAtOnce = 8;
constexpr int64_t kMostPlacesOfTile = 64;
constexpr int64_t kColumnsAtOnce = 6;
constexpr int64_t kTapsAtOnce = 9;
constexpr int64_t kPanel = 48;  // a whole number of tiles of AddFilters in each instruction set

}  // namespace gradfuse::cpu
