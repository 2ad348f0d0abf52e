#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "gradfuse/float16.h"
#include "kernels/cpu/scratch.h"

// Matrix products of blocks that the caller cuts, on the caller's thread, in the instruction set that kernels use: the
// factors are packed once, and multiplied as often as they are needed. A sum has the same order wherever in a block its
// element lies, so that results do not depend on how rows and columns are cut into blocks.
namespace gradfuse::cpu {

// Element (i, j) is at data[i * row_pitch + j * column_pitch]. Packing is fast where one of the pitches is 1.
template <class T>
struct Matrix {
  const T* data;
  int64_t row_pitch;
  int64_t column_pitch;

  Matrix Transposed() const { return {data, column_pitch, row_pitch}; }
};

// How many numbers a packed factor has: the left one `rows` by `depth`, the right one `depth` by `columns`.
template <class Real>
int64_t PackedLeftSize(int64_t rows, int64_t depth);
template <class Real>
int64_t PackedRightSize(int64_t depth, int64_t columns);

// T is a type of tensors, and 16-bit numbers are widened.
template <class T>
void PackLeft(const Matrix<T>& left, int64_t rows, int64_t depth, ComputeType<T>* packed);
template <class T>
void PackRight(const Matrix<T>& right, int64_t depth, int64_t columns, ComputeType<T>* packed);

// product (rows, columns) = left (rows, depth) times right (depth, columns), or with `adds` that much more. The rows of
// the product lie `pitch` apart.
template <class Real>
void MultiplyPacked(const Real* left, const Real* right, int64_t rows, int64_t columns, int64_t depth, Real* product,
                    int64_t pitch, bool adds);

// The same for a left factor that is not packed, with rows `left_pitch` apart: for one that is in the first-level cache
// and is used once.
template <class Real>
void MultiplyRows(const Real* left, int64_t left_pitch, const Real* right, int64_t rows, int64_t columns, int64_t depth,
                  Real* product, int64_t pitch, bool adds);

// The same for a left factor that lies by columns, which are `left_pitch` apart.
template <class Real>
void MultiplyColumns(const Real* left, int64_t left_pitch, const Real* right, int64_t rows, int64_t columns,
                     int64_t depth, Real* product, int64_t pitch, bool adds);

// The same for factors that are rounded to bfloat16, and sums in float32. Where the instruction set multiplies pairs of
// neighbours in depth (AVX512-BF16), these lie packed in the bits of a float. A packed factor has PairedDepth(depth)
// floats in the place of `depth`, and that is the argument of MultiplyPairs.
int64_t PairedDepth(int64_t depth);
template <class T>
void PackLeftPairs(const Matrix<T>& left, int64_t rows, int64_t depth, float* packed);
template <class T>
void PackRightPairs(const Matrix<T>& right, int64_t depth, int64_t columns, float* packed);
void MultiplyPairs(const float* left, const float* right, int64_t rows, int64_t columns, int64_t paired_depth,
                   float* product, int64_t pitch, bool adds);

// What blocks are best a multiple of: the rows and columns whose sums are in registers at once.
int64_t TileRows();
template <class Real>
int64_t TileColumns();

// Lets memory that is new with each call of a kernel be in huge pages, where it is much and the system has them.
void AskForHugePages(void* memory, size_t bytes);

// Numbers in lines of the cache of their own, which vectors do not cross; not set to anything.
template <class Real>
class Lines {
 public:
  Lines() = default;
  explicit Lines(int64_t count) : numbers_(AllocateScratch(static_cast<size_t>(count) * sizeof(Real))) {
    if (numbers_ == nullptr) throw std::bad_alloc();
    if (!IsFromSource(numbers_.get())) AskForHugePages(numbers_.get(), static_cast<size_t>(count) * sizeof(Real));
  }

  Real* data() const { return static_cast<Real*>(numbers_.get()); }

 private:
  std::unique_ptr<void, FreeScratchMemory> numbers_;
};

}  // namespace gradfuse::cpu
